"""Make the second source: a multi-head model with heads of 64 dimensions and pretrained knowledge.

It is made from SmolLM2-135M-Instruct in two steps. `gqa-convert convert --groups 9` repeats each of its 3 K/V heads
three times, which changes no output. Then all attention weights are trained on the language model's loss, on the mixed
calibration text of prose and code, in bfloat16 autocast with float32 weights: Adam, whose learning rate is, for each
matrix, a share of the root mean square of its numbers, warmed up over 10 steps and lowered to zero along a cosine.
Copies of a head receive different gradients, because they serve different query heads, and part. How far is printed,
and written into `training.json` of the result: the distance of two copies of a head as a share of their norm, averaged
over pairs and layers. Unrelated heads of equal norm have 1.41.

    python -m benchmarks.real.second_source --folder /tmp/real

The copies part at a high rate only, and the knowledge that this costs comes back at a low one, so the model of
docs/real-model.md was trained twice: `--start` continues with a model that this script made before, on other text
with another `--seed`.

A killed run resumes from its last state, which is saved every ten minutes.
"""

import argparse
import json
import math
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.loading import load_model, load_tokenizer
from gqa_convert.text.calibration import calibration_batches
from gqa_convert.text.losses import lm_loss

from .documents import MIXED, calibration_file, held_out_blocks
from .folders import DEFAULT_FOLDER, KV_HEADS, SECOND, SMOLLM2, model_folder, scratch

BLOCK = 1024
STEP_TOKENS = 2048
WARM_UP = 10
RECORD = "training.json"
DEFAULT_TOKENS = 1 << 19
DEFAULT_RATE = 0.01
_SAVE_SECONDS = 600
_REPORT_STEPS = 10


def head_distance(weight: torch.Tensor, heads: int, siblings: int) -> float:
    """The distance of sibling heads as a share of their norm, averaged over pairs.

    Args:
        weight: [heads * c, d], a key or value projection.
        heads: K/V heads.
        siblings: consecutive heads that began as copies of one.
    """
    families = weight.double().reshape(heads // siblings, siblings, -1)
    distances = []
    for family in families:
        for one, other in combinations(family, 2):
            distances.append(float((one - other).norm() / ((one.norm() + other.norm()) / 2)))
    return sum(distances) / len(distances)


def parting(model: Any) -> dict[str, float]:
    """The mean distance of sibling heads over all layers, of keys and of values."""
    heads, siblings = KV_HEADS[SECOND], KV_HEADS[SECOND] // KV_HEADS[SMOLLM2]
    found = {}
    for name in ("k_proj", "v_proj"):
        weights = [getattr(layer.self_attn, name).weight.detach() for layer in model.base_model.layers]
        found[name] = round(sum(head_distance(weight, heads, siblings) for weight in weights) / len(weights), 4)
    return found


def share_of_rate(step: int, steps: int) -> float:
    """Of the learning rate, at step 1 and the following."""
    return min(1.0, step / WARM_UP) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


class Training:
    """The run: model, optimizer, text and state file."""

    def __init__(self, folder: Path, tokens: int, rate: float, seed: int = 0, start: Path | None = None) -> None:
        """
        Args:
            folder: the benchmark's folder.
            tokens: of text.
            rate: the highest learning rate, as a share of the root mean square of a matrix.
            seed: of the choice of text.
            start: a result of an earlier run to continue with; None repeats the heads of SmolLM2.
        """
        first = start or scratch(folder, "repeated")
        if not first.is_dir():
            convert_checkpoint(model_folder(folder, SMOLLM2), first, KV_HEADS[SECOND], method="mean")
        self.model, _ = load_model(first, torch.float32)
        self.tokenizer = load_tokenizer(first)
        self._folder = folder
        self._earlier = None if start is None else json.loads((start / RECORD).read_text(encoding="utf-8"))
        self.settings = {"tokens": tokens, "rate": rate, "seed": seed, "tokens_per_step": STEP_TOKENS, "block": BLOCK}
        text = calibration_batches(
            first,
            str(calibration_file(folder, MIXED)),
            tokens,
            seed=seed,
            sequence_length=BLOCK,
            batch_tokens=STEP_TOKENS,
        )
        self._batches, self.steps = text.batches, len(text.batches)
        self.description = text.description
        self._names, weights = [], []
        for name, weight in self.model.named_parameters():
            weight.requires_grad_("self_attn" in name)
            if weight.requires_grad:
                self._names.append(name)
                weights.append(weight)
        self._rates = [rate * float(weight.detach().square().mean().sqrt()) for weight in weights]
        self._optimizer = torch.optim.Adam([{"params": [weight], "lr": 0.0} for weight in weights], betas=(0.9, 0.99))
        self._weights = weights
        self.step, self.seconds = 0, 0.0
        self._state_file = scratch(folder, "second.state")
        if self._state_file.is_file():
            self._load()
        else:
            self.before = self.held_out_loss()

    def _load(self) -> None:
        state = torch.load(self._state_file, weights_only=True)
        if state["settings"] != self.settings:
            sys.exit(f"{self._state_file} is of a run with {state['settings']}: give its options, or remove the file")
        with torch.no_grad():
            for weight, saved in zip(self._weights, state["weights"], strict=True):
                weight.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.before = state["step"], state["seconds"], state["before"]

    def save(self) -> None:
        partial = self._state_file.with_suffix(".partial")
        state = {
            "settings": self.settings,
            "weights": [weight.detach() for weight in self._weights],
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "before": self.before,
        }
        torch.save(state, partial)
        partial.replace(self._state_file)

    def run(self, until: int) -> None:
        """Train up to a step."""
        saved = time.monotonic()
        while self.step < until:
            began = time.monotonic()
            ids = self._batches[self.step]["input_ids"]
            self.step += 1
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * share_of_rate(self.step, self.steps)
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.model(input_ids=ids, use_cache=False).logits
            total, count = lm_loss(logits[:, :-1].float(), ids[:, 1:].contiguous(), overwrite=True)
            loss = total / count
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            now = time.monotonic()
            self.seconds += now - began
            if self.step % _REPORT_STEPS == 0 or self.step == until:
                sys.stderr.write(
                    f"step {self.step} of {self.steps}, loss {loss.item():.3f}, distance {parting(self.model)}, {self.seconds:.0f} s\n"
                )
            if now - saved > _SAVE_SECONDS or self.step == until:
                self.save()
                saved = now

    def held_out_loss(self, tokens: int = 4096) -> dict[str, float]:
        """The loss on held-out prose and code, in nats per token."""
        found = {}
        with torch.inference_mode():
            for kind in ("prose", "code"):
                blocks = held_out_blocks(self._folder, kind, self.tokenizer, BLOCK, tokens)
                losses = []
                for block in blocks:
                    logits = self.model(input_ids=block[None], use_cache=False).logits
                    total, count = lm_loss(logits[:, :-1].float(), block[None, 1:])
                    losses.append(float(total / count))
                found[kind] = round(sum(losses) / len(losses), 4)
        return found

    def publish(self, out: Path) -> dict[str, Any]:
        """Write the checkpoint in bfloat16, and return its record."""
        self.model.to(torch.bfloat16).to(torch.float32)  # the numbers stay those of bfloat16
        record = {
            "source": "SmolLM2-135M-Instruct, K/V heads repeated from 3 to 9, then all attention weights trained",
            "text": self.description,
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "training_tokens": self.step * STEP_TOKENS,
            "training_seconds": round(self.seconds),
            "distance_of_sibling_heads": parting(self.model),
            "held_out_loss_before": self.before,
            "held_out_loss_after": self.held_out_loss(),
            **self.settings,
            "earlier": self._earlier,
        }
        partial = out.with_name(f".{out.name}.new")
        for key in [key for key in vars(self.model.config) if key.startswith("multi_query")]:
            delattr(self.model.config, key)  # it has as many K/V heads as query heads
        self.model.to(torch.bfloat16).save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(out)
        self._state_file.unlink()
        return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="with smollm2/ and text/")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="of training text (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=DEFAULT_RATE, help="learning rate as a share of a matrix's size (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of text (default: %(default)s)")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="continue with an earlier result, moved there")
    parser.add_argument(
        "--stop-after", type=int, metavar="STEP", help="save the state there and stop; run again to resume"
    )
    arguments = parser.parse_args()
    folder = arguments.folder.expanduser()
    out = model_folder(folder, SECOND)
    if out.exists():
        sys.exit(f"{out} exists: remove it to make the model again, or move it away and name it with --start")
    start = arguments.start and arguments.start.expanduser()
    if start and not (start / RECORD).is_file():
        sys.exit(f"{start} has no {RECORD}: --start takes a result of this script")
    training = Training(folder, arguments.tokens, arguments.rate, arguments.seed, start)
    stop = min(arguments.stop_after or training.steps, training.steps)
    sys.stderr.write(f"{training.steps} steps, from {training.step} to {stop}\n")
    if stop < training.steps:
        training.run(stop)
        sys.stderr.write(f"stopped at step {training.step}; the same command without --stop-after finishes\n")
        return
    training.run(stop)
    sys.stdout.write(json.dumps(training.publish(out), indent=2) + "\n")


if __name__ == "__main__":
    main()
