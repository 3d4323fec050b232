"""Tokens a second of the uptraining loop, beside a bare loop in plain torch and transformers' Trainer, on the same
model, batches and optimizer.

    python benchmarks/uptrain_speed.py --output docs/results/uptrain-cpu.json
    torchrun --standalone --nproc_per_node 2 benchmarks/uptrain_speed.py       (a CPU: ACCELERATE_USE_CPU=true
    OMP_NUM_THREADS=1 in front) python benchmarks/uptrain_speed.py --device cuda --output docs/results/uptrain-cuda.json

Every round gives each contender the same number of optimizer steps, in an order that alternates; the first round warms
up and does not count. The figure to read is the ratio within a round, as a median with its range. All contenders have a
model of their own, from the same random weights: fused AdamW, gradients clipped to norm 1, and the bare loop does
nothing else but forward, cross-entropy, backward and step on tensors that are there already. The Trainer logs nothing
and saves nothing.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from gqa_convert.training import sharding
from gqa_convert.training.checkpoints import Progress
from gqa_convert.training.distributed import join, taking_part
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe import Recipe, make_recipe
from gqa_convert.training.trainer import Trainer

SIZES: dict[str, dict[str, int]] = {
    "demo": {
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 5,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "vocab_size": 2048,
    },
    "14M": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "vocab_size": 8192,
    },
    "110M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 32000,
    },
}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Operations a second in bfloat16, dense, by NVIDIA's data sheets."""

Turn = Callable[[], float]
"""Takes the steps of one round; seconds."""


class Blocks:
    """Random samples that are there already, as a memory-mapped file's would be."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.tokens_per_sample = length
        self._text = np.random.default_rng(0).integers(2, vocabulary, 1_000_000).astype(np.uint16)

    def batch(self, indices: list[int]) -> dict[str, np.ndarray[Any, Any]]:
        length = self.tokens_per_sample
        starts = [index * length % (len(self._text) - length - 1) for index in indices]
        rows = np.stack([self._text[start : start + length + 1] for start in starts]).astype(np.int64)
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def make_model(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES[arguments.size], max_position_embeddings=arguments.length, tie_word_embeddings=True
    )
    return transformers.LlamaForCausalLM(config).train()


def placed(model: Any, accelerator: Any) -> Any:
    return (
        sharding.replicate(model, accelerator.device) if accelerator.num_processes > 1 else model.to(accelerator.device)
    )


def ours(arguments: argparse.Namespace, recipe: Recipe, accelerator: Any) -> Turn:
    inner = make_model(arguments)
    model = placed(inner, accelerator)
    samples: Any = Blocks(arguments.length, inner.config.vocab_size)
    steps = arguments.steps * (arguments.rounds + 1)
    trainer = Trainer(
        recipe,
        model,
        build_optimizer(inner, recipe),
        samples,
        accelerator,
        steps=steps + 1,
        teacher=None,
        progress=Progress(),
    )
    run = trainer.run(lambda: False)

    def turn() -> float:
        began = time.perf_counter()
        for _ in range(arguments.steps):
            next(run)
        return synchronised(accelerator) - began

    return turn


def bare(arguments: argparse.Namespace, recipe: Recipe, accelerator: Any) -> Turn:
    inner = make_model(arguments)
    model = placed(inner, accelerator)
    optimizer = build_optimizer(inner, recipe)
    blocks, size = Blocks(arguments.length, inner.config.vocab_size), recipe.micro_batch_size
    batch = {
        name: torch.from_numpy(rows.copy()).to(accelerator.device)
        for name, rows in blocks.batch(list(range(size))).items()
    }
    parts = arguments.accumulation

    def turn() -> float:
        began = time.perf_counter()
        for _ in range(arguments.steps):
            for part in range(parts):
                sharding.set_gradient_sync(model, part == parts - 1)
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
                (cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()) / parts).backward()
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return synchronised(accelerator) - began

    return turn


class _Rows(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """The same samples for the Trainer, which shifts labels itself."""

    def __init__(self, blocks: Blocks, number: int) -> None:
        self._blocks, self._number = blocks, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self._blocks.batch([index])["input_ids"][0].copy())
        return {"input_ids": ids, "labels": ids}


def stock(arguments: argparse.Namespace, recipe: Recipe, accelerator: Any) -> Turn:
    """Its loop runs on a thread of its own, and a callback holds it between rounds: where its processes do not speak to
    one another.
    """
    import threading

    model = make_model(arguments)
    steps = arguments.steps * (arguments.rounds + 1)
    go, ready = threading.Semaphore(0), threading.Semaphore(0)

    class Pacer(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step % arguments.steps == 0:
                ready.release()
                go.acquire()

    samples = (steps + 1) * arguments.accumulation * recipe.micro_batch_size * accelerator.num_processes
    settings = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps + 1,
        per_device_train_batch_size=recipe.micro_batch_size,
        gradient_accumulation_steps=arguments.accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=recipe.precision == "bf16",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=accelerator.device.type == "cpu",
        dataloader_num_workers=0,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=accelerator.device.type == "cuda",
    )
    rows = _Rows(Blocks(arguments.length, model.config.vocab_size), samples)
    trainer = transformers.Trainer(model, settings, train_dataset=rows, callbacks=[Pacer()])
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(threads)
        if accelerator.device.type == "cuda":
            torch.cuda.set_device(accelerator.device)
        trainer.train()

    threading.Thread(target=work, daemon=True).start()
    ready.acquire()

    def turn() -> float:
        began = time.perf_counter()
        go.release()
        ready.acquire()
        return synchronised(accelerator) - began

    return turn


def synchronised(accelerator: Any) -> float:
    """The time when this device has nothing left to do."""
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def spread(numbers: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(numbers), 4),
        "least": round(min(numbers), 4),
        "most": round(max(numbers), 4),
    }


def flops_per_token(model: Any, length: int) -> float:
    """Forward and backward: 6 for each weight in a product, 12 L d for causal attention's two products, of which half
    is done.
    """
    config = model.config
    inner = config.num_attention_heads * config.head_dim
    return float(
        6 * sum(parameter.numel() for parameter in model.parameters()) + 6 * config.num_hidden_layers * inner * length
    )


def measure(arguments: argparse.Namespace, accelerator: Any) -> dict[str, Any]:
    tokens = arguments.length * arguments.micro_batch * arguments.accumulation * accelerator.num_processes
    recipe = make_recipe(
        {
            "model": "m",
            "output": "o",
            "data": "d",
            "tokens": tokens * 1000,
            "tokens_per_step": tokens,
            "micro_batch_size": arguments.micro_batch,
            "precision": arguments.precision,
            "schedule": "constant",
            "learning_rate": 1e-4,
        }
    )
    makers = {"ours": ours, "bare": bare, "trainer": stock}
    turns = {
        name: make(arguments, recipe, accelerator) for name, make in makers.items() if name in arguments.contenders
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for round_number in range(arguments.rounds + 1):
        for name in list(turns) if round_number % 2 else reversed(list(turns)):
            if accelerator.num_processes > 1:
                torch.distributed.barrier()
            times[name].append(turns[name]())
    kept = {name: each[1:] for name, each in times.items()}
    rates = {name: [arguments.steps * tokens / seconds for seconds in each] for name, each in kept.items()}
    found: dict[str, Any] = {"tokens_per_second": {name: spread(each) for name, each in rates.items()}}
    found["ours_over"] = {
        name: spread([mine / theirs for mine, theirs in zip(rates["ours"], rates[name], strict=True)])
        for name in rates
        if name != "ours"
    }
    model = make_model(arguments)
    found |= {
        "model": {"size": arguments.size, "parameters": sum(parameter.numel() for parameter in model.parameters())},
        "length": arguments.length,
        "micro_batch": arguments.micro_batch,
        "accumulation": arguments.accumulation,
        "steps_per_round": arguments.steps,
        "rounds": arguments.rounds,
        "processes": accelerator.num_processes,
        "precision": recipe.precision,
    }
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
        peak = next((number for key, number in PEAK.items() if key in device), None)
        operations = statistics.median(rates["ours"]) * flops_per_token(model, arguments.length)
        found |= {"device": device, "mfu": peak and round(operations / (peak * accelerator.num_processes), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, help="default: demo on a CPU, 110M on a GPU")
    parser.add_argument("--length", type=int, help="tokens of a sample; default 256 on a CPU, 1024 on a GPU")
    parser.add_argument("--micro-batch", type=int, help="samples of a forward pass; default 4 on a CPU, 16 on a GPU")
    parser.add_argument("--accumulation", type=int, default=2, help="forward passes of a step")
    parser.add_argument("--steps", type=int, help="of a round; default 5 on a CPU, 20 on a GPU")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--precision", choices=("bf16", "no"), help="default: no on a CPU, bf16 on a GPU")
    parser.add_argument(
        "--contenders", nargs="+", choices=("ours", "bare", "trainer"), default=["ours", "bare", "trainer"]
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    defaults = {
        "size": ("demo", "110M"),
        "length": (256, 1024),
        "micro_batch": (4, 16),
        "steps": (5, 20),
        "precision": ("no", "bf16"),
    }
    for name, choices in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, choices[arguments.device == "cuda"])
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    with taking_part():
        accelerator = join()
        found = measure(arguments, accelerator)
        if not accelerator.is_main_process:
            return
    found |= {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(load, 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(found, indent=2)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
