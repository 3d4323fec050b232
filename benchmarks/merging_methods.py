"""What merging by closed forms loses on the bundled model, beside mean pooling: held-out loss with nothing trained.

    python benchmarks/merging_methods.py --output docs/results/merging-demo.json

The merges happen in memory, on the loaded model, with the maths of gqa_convert/merging: this measures methods, not the converter.
`measured` uses the covariance of each layer's inputs on calibration text. `loop` merges layer after layer on the inputs that the merged
layers below it yield, and refits each output projection by ridge regression to the source's residual stream. `slow` merges the slowest
rotary frequencies as one block, from the frequency on that keeps each layer's attention nearest to the source's. `grouped` lets heads
that fit together share. `trained` gives each layer a few hundred steps of Adam towards the source's residual stream, then the refit again.
"""

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gqa_convert.demo import CHECKPOINT
from gqa_convert.evaluate import text_loss
from gqa_convert.loading import load_causal_lm, load_tokenizer
from gqa_convert.merging.alignment import align_rotary_keys, align_values
from gqa_convert.merging.factorisation import factor_values
from gqa_convert.merging.grouping import group_heads, pair_losses, rotary_pair_losses
from gqa_convert.merging.ridge import refit
from gqa_convert.merging.slow_rotary import candidate_starts, factor_slow_rotary_keys
from gqa_convert.stdlib_text import read_texts, source_files

Array = Any
Weights = dict[str, Array]
DAMPING = 0.01
RATE, BETAS, WARM_UP, LEAST_RATE = 2e-3, (0.9, 0.99), 10, 0.05
"""Of Adam; the rate falls along a cosine to a twentieth."""
ROWS = 4
"""Blocks of text in a step."""
PROBED = 8
"""Blocks of text on which the slow frequencies are chosen."""


def complex_pairs(rows: Array) -> Array:
    """[..., c, d] -> [..., c / 2, d]: rows j and j + c / 2 turn together."""
    half = rows.shape[-2] // 2
    return rows[..., :half, :] + 1j * rows[..., half:, :]


def real_rows(pairs: Array) -> Array:
    return np.concatenate([pairs.real, pairs.imag], axis=-2)


def pool(weights: Weights, covariance: Array | None, start: int) -> Weights:
    del covariance, start
    return weights | {"k": weights["k"].mean(0), "v": weights["v"].mean(0)}


def align(weights: Weights, covariance: Array | None, start: int) -> Weights:
    del covariance, start
    value, columns = align_values(weights["v"], weights["o"])
    key, queries = align_rotary_keys(complex_pairs(weights["k"]), complex_pairs(weights["q"]))
    return {"q": real_rows(queries), "k": real_rows(key), "v": value, "o": columns}


def factor(weights: Weights, covariance: Array | None, start: int) -> Weights:
    value, columns = factor_values(weights["v"], weights["o"], covariance, weighted=covariance is not None)
    key, queries = factor_slow_rotary_keys(complex_pairs(weights["k"]), complex_pairs(weights["q"]), start, covariance)
    return {"q": real_rows(queries), "k": real_rows(key), "v": value, "o": columns}


@dataclass(frozen=True)
class Method:
    merge: Callable[[Weights, Array | None, int], Weights]
    """Of one group."""
    measured: bool = False
    loop: bool = False
    slow: bool = False
    grouped: bool = False
    trained: bool = False


METHODS = {
    "mean": Method(pool),
    "align": Method(align),
    "factor": Method(factor),
    "factor, measured": Method(factor, measured=True),
    "mean, loop": Method(pool, loop=True),
    "factor, measured, loop": Method(factor, measured=True, loop=True),
    "factor, measured, loop, slow": Method(factor, measured=True, loop=True, slow=True),
    "factor, measured, loop, slow, grouped": Method(factor, measured=True, loop=True, slow=True, grouped=True),
    "factor, measured, loop, slow, grouped, trained": Method(factor, True, True, True, True, True),
}


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
        for name, matrix in self.matrices({part: torch.from_numpy(array).float() for part, array in weights.items()}).items():
            self.modules[number].get_parameter(name).data.copy_(matrix)

    def matrices(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The module's parameters; K/V heads [groups, c, d] are repeated, so that the model keeps its shape."""
        size = self.heads // len(weights["k"])
        rows = {"q": weights["q"]} | {name: weights[name].repeat_interleave(size, 0) for name in "kv"}
        found = {f"{name}_proj.weight": heads.flatten(0, 1) for name, heads in rows.items()}
        return found | {"o_proj.weight": weights["o"].transpose(0, 1).flatten(1)}

    def attention(self, number: int, weights: Weights | dict[str, torch.Tensor] | None, stream: torch.Tensor) -> torch.Tensor:
        """What the layer's attention adds to a residual stream [B, L, D], with other weights if given."""
        positions = torch.arange(stream.shape[1])[None]
        given = {
            "hidden_states": self.model.model.layers[number].input_layernorm(stream),
            "position_embeddings": self.model.model.rotary_emb(stream, positions),
            "attention_mask": None,
        }
        parameters = {} if weights is None else self.matrices({part: torch.as_tensor(each).float() for part, each in weights.items()})
        return torch.func.functional_call(self.modules[number], parameters, (), given)[0]

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


def convert(source: Any, groups: int, method: Method, text: torch.Tensor, targets: list[torch.Tensor], steps: int) -> Any:
    """A copy of the model with every layer merged by a method."""
    original, result = Layers(source), Layers(copy.deepcopy(source))
    for number in range(len(original.modules)):
        seen = result if method.loop else original
        covariance = covariance_of(seen.recorded(seen.modules[number], text)) if method.measured else None
        weights = original.read(number)
        if method.grouped and groups > 1:
            order = grouped(weights, covariance, groups)
            weights = {part: array[order] for part, array in weights.items()}
        start = original.width // 2
        if method.slow:
            start = slow_start(original, number, weights, groups, covariance, text)
        result.write(number, merged(weights, groups, method, covariance, start))
        if method.loop:
            refit_output(result, number, text, targets[number])
        if method.trained:
            train(result, number, groups, text, targets[number], steps)
            refit_output(result, number, text, targets[number])
    return result.model


def merged(weights: Weights, groups: int, method: Method, covariance: Array | None, start: int) -> Weights:
    size = len(weights["k"]) // groups
    parts = []
    for first in range(0, len(weights["k"]), size):
        group = {part: array[first : first + size] for part, array in weights.items()}
        group |= {part: group[part][:, None] for part in "qo"}  # one query head reads each of the source's K/V heads
        parts.append(method.merge(group, covariance, start))
    found = {part: np.stack([each[part] for each in parts]) for part in "kv"}
    return found | {part: np.concatenate([each[part][:, 0] for each in parts]) for part in "qo"}


def grouped(weights: Weights, covariance: Array | None, groups: int) -> Array:
    """The heads' new order. Values and keys count alike, each relative to its whole power; keys frequency by frequency."""
    values = pair_losses(weights["v"], np.swapaxes(weights["o"], -1, -2) @ weights["o"], covariance)
    keys, queries = complex_pairs(weights["k"]), complex_pairs(weights["q"])
    powers, seen = (np.einsum("hfd,de,hfe->hf", each, covariance, each.conj()).real for each in (queries, keys))
    outputs = weights["o"] @ weights["v"]
    whole = np.einsum("hDd,de,hDe->", outputs, covariance, outputs, optimize=True)
    return group_heads(values / whole + rotary_pair_losses(keys, powers, covariance) / np.sum(powers * seen), groups)


def slow_start(layers: Layers, number: int, weights: Weights, groups: int, covariance: Array | None, text: torch.Tensor) -> int:
    """The first slow frequency with which merged keys, beside the source's own values, keep attention's output nearest to the source's."""
    stream = layers.recorded(layers.model.model.layers[number], text[:PROBED]).float().unflatten(0, (PROBED, -1))
    wanted = layers.attention(number, weights, stream)
    frequencies = layers.model.model.rotary_emb.inv_freq.numpy()

    def error(start: int) -> float:
        found = merged(weights, groups, METHODS["factor, measured"], covariance, start)
        keys = found["k"].repeat(len(weights["k"]) // groups, axis=0)
        return float((layers.attention(number, weights | {"q": found["q"], "k": keys}, stream) - wanted).square().mean())

    return min(candidate_starts(frequencies, text.shape[1]), key=error)


def refit_output(layers: Layers, number: int, text: torch.Tensor, target: torch.Tensor) -> None:
    """Ridge regression of the output projection towards the source's residual stream behind this attention."""
    projection = layers.modules[number].o_proj
    inputs = layers.recorded(projection, text)
    wanted = target - layers.recorded(layers.model.model.layers[number], text)
    fitted = refit((inputs.T @ inputs).numpy(), (inputs.T @ wanted).numpy(), projection.weight.double().numpy())
    projection.weight.data.copy_(torch.from_numpy(fitted))


def train(layers: Layers, number: int, groups: int, text: torch.Tensor, target: torch.Tensor, steps: int) -> None:
    """Adam on all four projections, towards the source's residual stream behind this attention."""
    streams = layers.recorded(layers.model.model.layers[number], text).float().view(*text.shape, -1)
    wanted = target.float().view_as(streams) - streams
    weights = layers.read(number)
    size = layers.heads // groups
    held = weights | {part: weights[part][::size] for part in "kv"}
    trained = {part: torch.from_numpy(array.copy()).float().requires_grad_() for part, array in held.items()}
    optimizer = torch.optim.Adam(trained.values(), lr=RATE, betas=BETAS)
    generator, order = torch.Generator().manual_seed(0), torch.empty(0, dtype=torch.long)
    scale = wanted.square().mean()
    for step in range(steps):
        if len(order) < ROWS:
            order = torch.cat([order, torch.randperm(len(text), generator=generator)])
        batch, order = order[:ROWS], order[ROWS:]
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)
        with torch.enable_grad():
            loss = (layers.attention(number, trained, streams[batch]) - wanted[batch]).square().mean() / scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    layers.write(number, {part: each.detach().double().numpy() for part, each in trained.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[6, 4, 3, 1])
    parser.add_argument("--calibration-tokens", type=int, default=20480)
    parser.add_argument("--steps", type=int, default=200, help="of each layer, where it is trained")
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
        "steps": arguments.steps,
        "losses": {},
        "processor_seconds": {},
    }
    print(f"source {base:.3f}")
    for name, method in METHODS.items():
        losses, began = {}, time.process_time()
        for groups in arguments.groups:
            result = convert(source, groups, method, text, targets, arguments.steps)
            losses[groups] = round(text_loss(result, held_out, batch=8), 4)
        record["losses"][name] = losses
        record["processor_seconds"][name] = round(time.process_time() - began)
        print(f"{name:<48}" + "".join(f"{loss:8.3f}" for loss in losses.values()), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
