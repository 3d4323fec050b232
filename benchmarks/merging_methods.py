"""What merging by closed forms loses on the bundled model, beside mean pooling: held-out loss with nothing trained.

    python benchmarks/merging_methods.py --output docs/results/merging-demo.json

The merges happen in memory, on the loaded model, with the maths of gqa_convert/merging: this measures methods, not the converter, which
has only pooling yet. `measured` uses the covariance of each layer's inputs on calibration text. `loop` merges layer after layer on the
inputs that the merged layers below it yield, and refits each output projection by ridge regression to the source's residual stream.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gqa_convert.demo import CHECKPOINT
from gqa_convert.evaluate import text_loss
from gqa_convert.loading import load_causal_lm, load_tokenizer
from gqa_convert.merging.alignment import align_rotary_keys, align_values
from gqa_convert.merging.factorisation import factor_rotary_keys, factor_values
from gqa_convert.stdlib_text import read_texts, source_files

Array = Any
Weights = dict[str, Array]
DAMPING, RIDGE = 0.01, 1e-3


def complex_pairs(rows: Array) -> Array:
    """[..., c, d] -> [..., c / 2, d]: rows j and j + c / 2 turn together."""
    half = rows.shape[-2] // 2
    return rows[..., :half, :] + 1j * rows[..., half:, :]


def real_rows(pairs: Array) -> Array:
    return np.concatenate([pairs.real, pairs.imag], axis=-2)


def pool(weights: Weights, covariance: Array | None) -> Weights:
    del covariance
    return weights | {"k": weights["k"].mean(0), "v": weights["v"].mean(0)}


def align(weights: Weights, covariance: Array | None) -> Weights:
    del covariance
    value, columns = align_values(weights["v"], weights["o"])
    key, queries = align_rotary_keys(complex_pairs(weights["k"]), complex_pairs(weights["q"]))
    return {"q": real_rows(queries), "k": real_rows(key), "v": value, "o": columns}


def factor(weights: Weights, covariance: Array | None) -> Weights:
    value, columns = factor_values(weights["v"], weights["o"], covariance, weighted=covariance is not None)
    key, queries = factor_rotary_keys(complex_pairs(weights["k"]), complex_pairs(weights["q"]), covariance)
    return {"q": real_rows(queries), "k": real_rows(key), "v": value, "o": columns}


METHODS: dict[str, tuple[Callable[[Weights, Array | None], Weights], bool, bool]] = {
    "mean": (pool, False, False),
    "align": (align, False, False),
    "factor": (factor, False, False),
    "factor, measured": (factor, True, False),
    "mean, loop": (pool, False, True),
    "factor, measured, loop": (factor, True, True),
}
"""Name: how a group is merged, whether the covariance is measured, whether layers are refitted in a loop."""


class Layers:
    """The attention projections of a Llama, cut into heads."""

    def __init__(self, model: Any) -> None:
        self.model, config = model, model.config
        self.heads, self.width = config.num_attention_heads, config.head_dim
        self.modules = [layer.self_attn for layer in model.model.layers]

    def read(self, number: int) -> Weights:
        """q, k, v [heads, c, d] and o [heads, D, c], in float64."""
        module = self.modules[number]
        found = {name: getattr(module, f"{name}_proj").weight.detach().double().numpy() for name in "qkvo"}
        cut = {name: found[name].reshape(self.heads, self.width, -1) for name in "qkv"}
        return cut | {"o": found["o"].reshape(-1, self.heads, self.width).transpose(1, 0, 2)}

    def write(self, number: int, weights: Weights) -> None:
        """K/V heads [groups, c, d] are repeated, so that the model keeps its shape."""
        size = self.heads // len(weights["k"])
        rows = {"q": weights["q"]} | {name: weights[name].repeat(size, axis=0) for name in "kv"}
        rows = {name: array.reshape(self.heads * self.width, -1) for name, array in rows.items()}
        rows["o"] = weights["o"].transpose(1, 0, 2).reshape(-1, self.heads * self.width)
        for name, array in rows.items():
            getattr(self.modules[number], f"{name}_proj").weight.data.copy_(torch.from_numpy(array.copy()))

    def recorded(self, module: Any, text: torch.Tensor, *, keyword: str | None = None) -> torch.Tensor:
        """What goes into a module on the calibration text, [tokens, width]."""
        found: list[torch.Tensor] = []

        def note(_: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = inputs[0] if inputs else keywords[keyword or "hidden_states"]
            found.append(states.reshape(-1, states.shape[-1]).double())

        handle = module.register_forward_pre_hook(note, with_kwargs=True)
        for batch in text.split(8):
            self.model(input_ids=batch, use_cache=False)
        handle.remove()
        return torch.cat(found)


def covariance_of(inputs: torch.Tensor) -> Array:
    """E[x x^T], damped."""
    found = (inputs.T @ inputs / len(inputs)).numpy()
    return found + DAMPING * np.mean(np.diag(found)) * np.eye(len(found))


def convert(source: Any, groups: int, name: str, text: torch.Tensor, targets: list[torch.Tensor]) -> Any:
    """A copy of the model with every layer merged by a method."""
    merge, measured, loop = METHODS[name]
    original, result = Layers(source), Layers(copy.deepcopy(source))
    size = original.heads // groups
    for number in range(len(original.modules)):
        seen = (result if loop else original).recorded(original.modules[number] if not loop else result.modules[number], text)
        covariance = covariance_of(seen) if measured else None
        weights = original.read(number)
        parts = []
        for first in range(0, original.heads, size):
            group = {part: array[first : first + size] for part, array in weights.items()}
            group |= {part: group[part][:, None] for part in "qo"}  # one query head reads each of the source's K/V heads
            parts.append(merge(group, covariance))
        merged = {part: np.stack([each[part] for each in parts]) for part in "kv"}
        merged |= {part: np.concatenate([each[part][:, 0] for each in parts]) for part in "qo"}
        result.write(number, merged)
        if loop:
            refit(result, number, text, targets[number])
    return result.model


def refit(layers: Layers, number: int, text: torch.Tensor, target: torch.Tensor) -> None:
    """Ridge regression of the output projection towards the source's residual stream behind this attention."""
    module = layers.modules[number]
    inputs = layers.recorded(module.o_proj, text)
    wanted = target - layers.recorded(layers.model.model.layers[number], text)
    gram = inputs.T @ inputs
    ridge = RIDGE * gram.diagonal().mean()
    before = module.o_proj.weight.double()
    fitted = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), inputs.T @ wanted + ridge * before.T)
    module.o_proj.weight.data.copy_(fitted.T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[6, 4, 3, 1])
    parser.add_argument("--calibration-tokens", type=int, default=20480)
    parser.add_argument("--held-out-tokens", type=int, default=40000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    source, _ = load_causal_lm(CHECKPOINT, torch.float32)
    tokenizer = load_tokenizer(CHECKPOINT)
    length = source.config.max_position_embeddings

    def tokens(texts: list[str], count: int) -> list[int]:
        ids: list[int] = []
        for each in texts:
            ids += [*tokenizer.backend_tokenizer.encode(each).ids, tokenizer.eos_token_id]
            if len(ids) >= count:
                break
        return ids[:count]

    files = read_texts(source_files(held_out=False))
    np.random.default_rng(0).shuffle(files)
    text = torch.tensor(tokens(files, arguments.calibration_tokens // length * length)).view(-1, length)
    held_out = tokens(read_texts(source_files(held_out=True)), arguments.held_out_tokens)
    layers = Layers(source)
    targets = [layers.recorded(layer.post_attention_layernorm, text) for layer in source.model.layers]
    base = text_loss(source, held_out, batch=8)
    record: dict[str, Any] = {
        "command": ["python", "benchmarks/merging_methods.py", *sys.argv[1:]],
        "source_loss": round(base, 4),
        "calibration_tokens": text.numel(),
        "held_out_tokens": len(held_out),
        "losses": {},
    }
    print(f"source {base:.3f}")
    for name in METHODS:
        losses = {
            groups: round(text_loss(convert(source, groups, name, text, targets), held_out, batch=8), 4) for groups in arguments.groups
        }
        record["losses"][name] = losses
        print(f"{name:<24}" + "".join(f"{loss:8.3f}" for loss in losses.values()), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
