"""Optimizer steps of small models on a number of processes, for comparison: what each process
runs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

LENGTH = 16
VOCABULARY = 96
KINDS = {"single": 1, "ddp": 2, "fsdp": 2}
"""The processes of each way to share a model."""
SHARDING = {"single": "auto", "ddp": "replicate", "fsdp": "full"}

_STATED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BASE, CASES, ADAPTED, MODELS = (_STATED[name] for name in ("base", "cases", "adapted", "models"))


class RaggedSamples:
    """Random samples with unequal numbers of labels."""

    tokens_per_sample = LENGTH

    def __init__(self, seq2seq: bool) -> None:
        self.seq2seq = seq2seq

    def batch(self, indices: list[int]) -> dict[str, np.ndarray]:
        rows = []
        for index in indices:
            rng = np.random.default_rng(index)
            row = {name: rng.integers(2, VOCABULARY, LENGTH) for name in ("input_ids", "labels")}
            row["labels"][rng.integers(1, LENGTH) :] = -100
            if self.seq2seq:
                row["decoder_input_ids"] = rng.integers(2, VOCABULARY, LENGTH)
            rows.append(row)
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def small_model(kind: str, seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(kind, vocab_size=VOCABULARY, **MODELS[kind]))


def run_cases(target: str) -> None:
    """Every case on the processes there are; the main process writes numbers and tensors to
    `target` with the kind's name behind it.
    """
    from gqa_convert.processes import join, taking_part

    with taking_part():
        accelerator = join()
        for kind in (
            kind for kind, processes in KINDS.items() if processes == accelerator.num_processes
        ):
            layout = {"sharding": SHARDING[kind]}
            found: dict[str, Any] = {}
            for name, keys in CASES.items():
                steps = take_steps(accelerator, keys | layout)
                found |= {f"{name}/{key}": value for key, value in steps.items()}
            for name, keys in ADAPTED.items():
                tensors = adapt(accelerator, Path(f"{target}-{kind}-{name}"), keys | layout)
                found |= {f"adapted {name}/{key}": value for key, value in tensors.items()}
            if accelerator.is_main_process:
                np.savez(f"{target}-{kind}.npz", **found)


def adapt(accelerator: Any, folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Losses of two steps with adapters, and the merged weights after a checkpoint was saved and
    restored.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    from gqa_convert import sharding
    from gqa_convert.training.checkpoints import Progress, state_of
    from gqa_convert.training.export import merged_model
    from gqa_convert.training.models import load_student, place
    from gqa_convert.training.optimizers import build_optimizer
    from gqa_convert.training.recipe import make_recipe
    from gqa_convert.training.trainer import Trainer

    recipe = make_recipe(BASE | {"lora": {"rank": 3}, "learning_rate": 1e-2} | keys)
    if accelerator.is_main_process:
        small_model("llama").save_pretrained(folder)
    accelerator.wait_for_everyone()
    shards = sharding.number_of_shards(recipe.sharding, accelerator.num_processes)
    torch.manual_seed(0)
    model = load_student(recipe, folder, sharded=shards > 1)
    placed = place(model, accelerator.device, shards=shards, bf16=recipe.precision == "bf16")
    optimizer = build_optimizer(model, recipe)
    types = {str(each.dtype) for each in model.parameters() if each.requires_grad}
    samples: Any = RaggedSamples(seq2seq=False)
    trainer = Trainer(recipe, placed, optimizer, samples, Progress())
    found: dict[str, Any] = {
        "loss": np.array([result.loss for result in trainer.run(lambda: False)])
    }
    alone = accelerator.num_processes == 1
    dcp.save(state_of(placed, optimizer), checkpoint_id=folder / "saved", no_dist=alone)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    for moments in optimizer.state.values():
        moments["exp_avg"].zero_()
    state = state_of(placed, optimizer)
    dcp.load(state, checkpoint_id=folder / "saved", no_dist=alone)
    set_optimizer_state_dict(placed, optimizer, state["optimizer"])
    found["moment"] = np.array(
        sum(float(_whole(each["exp_avg"]).sum()) for each in optimizer.state.values())
    )
    merged = merged_model(model, folder)
    if merged is not None:
        tensors = merged.state_dict()
        found |= {f"merged {name}": tensor.float().numpy() for name, tensor in tensors.items()}
    return found | {"types": np.array(sorted(types))}


def take_steps(accelerator: Any, keys: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from gqa_convert import sharding
    from gqa_convert.training.checkpoints import Progress
    from gqa_convert.training.models import add_adapters, recompute
    from gqa_convert.training.optimizers import build_optimizer
    from gqa_convert.training.recipe import make_recipe
    from gqa_convert.training.trainer import Trainer

    kind = keys.pop("model", "llama")
    recipe = make_recipe(BASE | keys)
    model = small_model(kind).train()
    if recipe.gradient_checkpointing:
        recompute(model)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora)
    placed, teacher = (
        model,
        small_model(kind, seed=1).eval().requires_grad_(False) if recipe.teacher else None,
    )
    if sharding.number_of_shards(recipe.sharding, accelerator.num_processes) > 1:
        placed = sharding.shard(model, accelerator.device, bf16=recipe.precision == "bf16")
        teacher = teacher and sharding.shard(teacher, accelerator.device, bf16=False)
    elif accelerator.num_processes > 1:
        placed = sharding.replicate(model.to(accelerator.device))
    optimizer = build_optimizer(model, recipe)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}

    def note(*_: Any) -> None:
        for parameter, name in names.items():
            if parameter.grad is not None and f"gradient {name}" not in found:
                found[f"gradient {name}"] = _whole(parameter.grad)

    optimizer.register_step_pre_hook(note)
    samples: Any = RaggedSamples(kind == "t5")
    trainer = Trainer(recipe, placed, optimizer, samples, Progress(), teacher)
    results = list(trainer.run(lambda: False))
    for name in ("loss", "gradient_norm"):
        found[name] = np.array([getattr(result, name) for result in results])
    found["skipped"] = np.array([result.skipped for result in results])
    state = get_model_state_dict(
        placed, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return found | {f"weight {name}": tensor.float().numpy() for name, tensor in state.items()}


def _whole(tensor: Any) -> Any:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().numpy().copy()


def read(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)
