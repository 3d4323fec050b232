"""Train one of the models that merging methods are judged on, on the Python standard library's sources.

    python -m benchmarks.quality.train qwen2 --cache FOLDER [--tokens N]      also gpt2, t5; in the repository's root

It needs no network and no GPU. A killed run goes on from its last checkpoint when the same command is given again;
while the learning rate is still constant, `--tokens` may then be another number, because nothing before the decay
depends on it. The finished checkpoint is FOLDER/qwen2, with what it took and the loss it reached in `training.json`.
"""

import argparse
import json
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from gqa_convert.data.samples import open_samples
from gqa_convert.families.loading import load_tokenizer, no_bars
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe import Recipe, make_recipe
from gqa_convert.training.schedules import learning_rate

from .models import DEFAULT_CACHE, SPECS, Spec, quality_tokenizer, save_tokenizer
from .text import HELD_OUT_TOKENS, held_out_loss, training_text

DECAY_SHARE = 0.4
SAVE_SECONDS = 60.0


def recipe_of(spec: Spec, arguments: argparse.Namespace, text: Path) -> Recipe:
    """The run as a recipe, for the optimizer and the schedule that uptraining has too."""
    return make_recipe(
        {
            "model": arguments.model,
            "output": str(arguments.cache / arguments.model),
            "data": str(text),
            "objective": spec.objective,
            "tokens": arguments.tokens or spec.tokens,
            "tokens_per_step": arguments.tokens_per_step or spec.tokens_per_step,
            "sequence_length": spec.context,
            "optimizer": "adamw",
            "learning_rate": arguments.learning_rate or spec.learning_rate,
            "weight_decay": 0.1,
            "schedule": "wsd",
            "decay_share": DECAY_SHARE,
            "final_learning_rate": 0.0,
            "warmup_steps": 50,
            "seed": arguments.seed,
        }
    )


class Run:
    """A training run with its state on the disk."""

    def __init__(self, spec: Spec, recipe: Recipe, tokenizer: Any, cache: Path, name: str) -> None:
        torch.manual_seed(recipe.seed)
        self.spec, self.recipe, self.state_file = spec, recipe, cache / f"{name}.state.pt"
        self.model = spec.build(tokenizer)
        self.optimizer = build_optimizer(self.model, recipe)
        self.samples = open_samples(
            str(recipe.data[0].source),
            tokenizer,
            objective=spec.objective,
            sequence_length=spec.context,
            seed=recipe.seed,
            cache=cache / "tokens",
            decoder_start=getattr(self.model.config, "decoder_start_token_id", None),
        )
        self.step_size = recipe.samples_per_step(self.samples.tokens_per_sample)
        self.steps = recipe.steps(self.samples.tokens_per_sample)
        self.step, self.seconds = 0, 0.0
        if self.state_file.is_file():
            self._load()

    @property
    def tokens(self) -> int:
        """Of text, seen so far."""
        return int(self.step * self.step_size * self.samples.tokens_per_sample)

    def _settings(self) -> dict[str, Any]:
        free = {"tokens", "output", "data"}
        return {key: value for key, value in self.recipe.resolved().items() if key not in free} | {
            "samples": self.samples.fingerprint
        }

    def _load(self) -> None:
        state = torch.load(self.state_file, weights_only=True)
        if state["settings"] != self._settings():
            sys.exit(f"{self.state_file} is of a run with other settings: remove it, or give the command of that run")
        if state["steps"] != self.steps and state["step"] > (1 - DECAY_SHARE) * min(state["steps"], self.steps):
            sys.exit(
                f"{self.state_file} is past where the decay to {self.recipe.tokens} tokens begins: give --tokens as before"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        temporary = self.state_file.with_suffix(".new")
        state = {
            "settings": self._settings(),
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, temporary)
        temporary.replace(self.state_file)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: rows for name, rows in batch.items() if name != "labels"}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(**inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    def train(self) -> None:
        compiled = torch.compile(self._loss, dynamic=False)
        saved = time.monotonic()
        while self.step < self.steps:
            began = time.monotonic()
            first = self.step * self.step_size
            batch = {
                name: torch.from_numpy(rows)
                for name, rows in self.samples.batch(range(first, first + self.step_size)).items()
            }
            loss = compiled(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.recipe, self.step, self.steps)
            self.optimizer.step()
            self.optimizer.zero_grad()
            now = time.monotonic()
            self.seconds += now - began
            if self.step % 50 == 0 or self.step == self.steps:
                sys.stdout.write(
                    f"step {self.step} of {self.steps}, {self.tokens:,} tokens, loss {loss.item():.3f}, {self.seconds:.0f} s\n"
                )
                sys.stdout.flush()
            if now - saved > SAVE_SECONDS or self.step == self.steps:
                self.save()
                saved = now


def publish(run: Run, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint beside itself, and give it its name when it is whole."""
    out, cache = arguments.cache / arguments.model, arguments.cache
    model = run.model.to(torch.bfloat16).eval()
    temporary = out.with_name(f".{out.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    with no_bars():
        model.save_pretrained(temporary)
    save_tokenizer(tokenizer, temporary)
    loaded = load_tokenizer(temporary)
    if loaded.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        sys.exit(f"{temporary} loads with another tokenizer than the model was trained with")
    model.to(torch.float32)  # the numbers stay those of bfloat16
    loss = held_out_loss(model, tokenizer, objective=run.spec.objective, context=run.spec.context, cache=cache)
    record = {
        "command": ["python", "-m", "benchmarks.quality.train", *sys.argv[1:]],
        "text": "sources of the Python standard library with its tests, one file in twenty held out",
        "objective": run.spec.objective,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training_tokens": run.tokens,
        "epochs": round(run.tokens / (run.samples.epoch_samples * run.samples.tokens_per_sample), 3)
        if run.samples.epoch_samples
        else None,
        "steps": run.steps,
        "tokens_per_step": run.step_size * run.samples.tokens_per_sample,
        "training_seconds": round(run.seconds),
        "held_out_loss_nats_per_token": round(loss, 4),
        "held_out_tokens": HELD_OUT_TOKENS,
        "recipe": {key: value for key, value in run.recipe.resolved().items() if key not in ("output", "data")},
        "config": model.config.to_dict(),
        "hardware": f"{torch.get_num_threads()} CPU threads, bfloat16 autocast, torch.compile",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (temporary / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out)
    run.state_file.unlink()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SPECS)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument(
        "--tokens", type=lambda text: int(float(text)), help="of text; default: the model's own number in models.py"
    )
    parser.add_argument("--tokens-per-step", type=int, help="default: the model's own in models.py")
    parser.add_argument("--learning-rate", type=float, help="the peak; default: the model's own in models.py")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.cache = arguments.cache.expanduser()
    out = arguments.cache / arguments.model
    if out.exists():
        sys.stdout.write(f"{out} is there already\n{(out / 'training.json').read_text(encoding='utf-8')}")
        return
    spec, tokenizer = SPECS[arguments.model], quality_tokenizer(arguments.model)
    recipe = recipe_of(spec, arguments, training_text(arguments.cache))
    run = Run(spec, recipe, tokenizer, arguments.cache, arguments.model)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    sys.stdout.write(
        f"{parameters:,} parameters, {run.steps} steps from {run.step} on, {run.samples.epoch_samples} samples in an epoch\n"
    )
    sys.stdout.flush()
    run.train()
    record = publish(run, tokenizer, arguments)
    sys.stdout.write(
        f"held-out loss {record['held_out_loss_nats_per_token']} nats per token, {record['training_seconds']} s\n"
    )


if __name__ == "__main__":
    main()
