"""A few steps of TRL's SFTTrainer and DPOTrainer on a checkpoint, with all weights and with LoRA, and what they save.

    pip install trl peft
    python -m benchmarks.trl_training MODEL --out FOLDER [--trust-remote-code]
    python -m benchmarks.trl_training --random gpt2|gpt_neox MODEL

The second form writes a model of two layers with random weights, twelve heads and the bundled model's tokenizer, to be converted.

The training uses transformers, TRL and PEFT alone, as on a machine without gqa-convert, and runs on the CPU. For every run, a line on
standard output says how the loss on the training rows changed, how many K/V heads the saved model keeps in its cache once
it is loaded again, and how far its logits are from those of the trained model, as saved and with the config of MODEL.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback

DEMO = Path(__file__).parents[1] / "gqa_convert" / "demo_checkpoint"
STEPS = 8
ROWS = [
    ("def add(left, right):\n", "    return left + right\n", "    return None\n"),
    ("def double(value):\n", "    return 2 * value\n", "    pass\n"),
    ("class Empty:\n", '    """An empty class."""\n', "    x = y = z\n"),
    ("for number in range(3):\n", "    print(number)\n", "    raise SystemExit\n"),
]
"""A prompt, the text that follows it, and a text that should not."""


def trained(kind: str, model: PreTrainedModel, tokenizer: Any, folder: Path, *, lora: bool) -> Any:
    """The trainer after its last step.

    Args:
        kind: `sft` or `dpo`.
        model: is changed.
        tokenizer: of the model.
        folder: for the trainer's own files.
        lora: train adapters rather than all weights.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    config, trainer = (SFTConfig, SFTTrainer) if kind == "sft" else (DPOConfig, DPOTrainer)
    if kind == "sft":
        rows = [{"prompt": prompt, "completion": good} for prompt, good, _ in ROWS]
    else:
        rows = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in ROWS]
    options = config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=len(ROWS),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        trust_remote_code=bool(getattr(model.config, "auto_map", None)),  # DPO loads its reference model anew
    )
    made = trainer(
        model=model,
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    made.remove_callback(PrinterCallback)  # standard output is for the results
    made.train()
    return made


def cached_heads(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The logits, and the K/V heads that each layer keeps in the cache."""
    with torch.no_grad():
        made = model.eval()(ids, use_cache=True)
    return made.logits, sorted({layer.keys.shape[1] for layer in made.past_key_values.layers})


def run(kind: str, source: str, out: Path, *, lora: bool, trust: bool) -> dict[str, Any]:
    """Train, save, load again and compare."""
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)  # it reads the config, too
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust)
    before = set(model.state_dict())
    trainer = trained(kind, model, tokenizer, out / "trainer", lora=lora)
    found = trainer.model
    if lora:
        trainer.save_model(str(out / "adapter"))
        found = found.merge_and_unload()
    ids = tokenizer("".join(ROWS[0][:2]), return_tensors="pt").input_ids
    expected, heads = cached_heads(found, ids)
    found.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", trust_remote_code=trust)
    logits, heads_after = cached_heads(loaded, ids)
    if lora:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust)
        adapted = PeftModel.from_pretrained(base, out / "adapter")
        adapted_logits, _ = cached_heads(adapted, ids)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    saved = json.loads((out / "model" / "config.json").read_text())
    for name in ("config.json", "tokenizer_config.json"):  # the converted ones, which older software reads too
        shutil.copy(Path(source) / name, out / "model" / name)
    mended = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32, trust_remote_code=trust)
    mended_logits, _ = cached_heads(mended, ids)
    return {
        "trainer": kind,
        "trained": "LoRA" if lora else "all weights",
        "class": type(found).__name__,
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
        "kv_heads_in_cache": [heads, heads_after],
        "same_tensor_names": set(loaded.state_dict()) == before,
        "largest_logit_difference": (logits - expected).abs().max().item(),
        "largest_logit_difference_of_adapter": (adapted_logits - expected).abs().max().item() if lora else None,
        "largest_logit_difference_with_converted_config": (mended_logits - expected).abs().max().item(),
        "spread": (expected.max() - expected.min()).item(),
        "files": sorted(path.name for path in (out / "model").iterdir()),
        "config": {key: saved.get(key) for key in ("model_type", "num_key_value_heads", "rope_theta", "use_cache")},
    }


def write_random(kind: str, folder: str) -> None:
    """Write a model of two layers with random weights.

    Args:
        kind: `gpt2` or `gpt_neox`.
        folder: to write it to.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "max_position_embeddings": 256}
    if kind == "gpt_neox":
        sizes["intermediate_size"] = 192
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **sizes, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str]) -> None:
    """Run both trainers with all weights and with LoRA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="converted checkpoint with a tokenizer")
    parser.add_argument("--out", type=Path, help="new folder for the trained models")
    parser.add_argument("--random", choices=("gpt2", "gpt_neox"), help="write a random model to MODEL and stop")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's modelling file")
    options = parser.parse_args(arguments)
    if options.random:
        write_random(options.random, options.model)
        return
    if options.out is None:
        parser.error("--out names a new folder for the trained models")
    for kind in ("sft", "dpo"):
        for lora in (False, True):
            torch.manual_seed(0)
            out = options.out / f"{kind}-{'lora' if lora else 'all'}"
            made = run(kind, options.model, out, lora=lora, trust=options.trust_remote_code)
            sys.stdout.write(json.dumps(made) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
