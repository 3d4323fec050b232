"""Where a conversion of SmolLM2-135M loses: by layer, query head and rotary frequency, on held-out text.

    python -m benchmarks.real.error_sites --folder FOLDER [--method fit] [--seed 0] [--tokens 4096]

FOLDER is that of `benchmarks.real`. Each layer of the result gets the source's inputs, so that no error of the layers
before it counts. `python -m benchmarks.real.report` writes the tables of docs/real-model.md.

Shape legend: b windows, l length, H query heads, c head_dim, D hidden_size.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from benchmarks.records import command_line, fingerprint, versions
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.families.loading import load_model, load_tokenizer

from .conversions import METHODS, Job, converted
from .documents import MIXED, held_out_blocks
from .folders import DEFAULT_FOLDER, TARGET, model_folder

OUTPUT = Path("docs/results/real-error-sites.json")
WINDOW = 512
BAND = 4
"""Rotary pairs of a band of fast ones. The slower half is one band: `fit` may ignore the rotation of slow pairs, and then
it mixes them.
"""
CALIBRATION_TOKENS = 24_576


@dataclass(frozen=True)
class Parts:
    """An attention layer's computation.

    Attributes:
        queries: rotated, [b, H, l, c].
        keys: rotated, repeated for each query head, [b, H, l, c].
        probabilities: [b, H, l, l].
        contributions: what each query head adds to the output, [b, H, l, D].
    """

    queries: Tensor
    keys: Tensor
    probabilities: Tensor
    contributions: Tensor


def parts_of(attention: Any, states: Tensor, rotations: tuple[Tensor, Tensor]) -> Parts:
    """Compute a Llama's attention piece by piece.

    Args:
        attention: the module.
        states: its normed inputs, [b, l, D].
        rotations: cosines and sines of the positions.
    """
    head_dim, ratio = attention.head_dim, attention.num_key_value_groups
    queries, keys, values = (
        projection(states).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, *rotations)
    keys, values = repeat_kv(keys, ratio), repeat_kv(values, ratio)
    scores = attention.scaling * queries @ keys.transpose(2, 3)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(later, -math.inf).softmax(-1)
    columns = attention.o_proj.weight.unflatten(1, (-1, head_dim))
    contributions = torch.einsum("bhlc,dhc->bhld", probabilities @ values, columns)
    return Parts(queries, keys, probabilities, contributions)


def spread(probabilities: Tensor, scores: Tensor) -> float:
    """The sum over queries of the scores' variance over the keys that they attend to; half of it is, for small
    differences of scores, the divergence of attention (scores that rise all alike change nothing).

    Args:
        probabilities: [b, H, l, l].
        scores: likewise.
    """
    mean = (probabilities * scores).sum(-1, keepdim=True)
    return float((probabilities * (scores - mean).square()).sum())


def bands_of(pairs: int) -> list[range]:
    """The rotary pairs of each band."""
    slow = pairs // 2
    return [*(range(first, min(first + BAND, slow)) for first in range(0, slow, BAND)), range(slow, pairs)]


class LayerSums:
    """Errors of one layer, added up over windows.

    Args:
        heads: query heads.
        pairs: rotary pairs of a head.
    """

    def __init__(self, heads: int, pairs: int) -> None:
        self._bands = [*bands_of(pairs), range(pairs)]
        self._power = self._missed = self._divergence = 0.0
        self._heads = torch.zeros(heads, dtype=torch.float64)
        self._signal, self._errors = [0.0] * len(self._bands), [0.0] * len(self._bands)
        self._queries = 0

    def add(self, source: Parts, result: Parts, scaling: float) -> None:
        """Add a window.

        Args:
            source: the source's layer.
            result: that of the result on the same inputs, its query heads in the source's order.
            scaling: of the scores.
        """
        wanted, found = source.contributions.sum(1), result.contributions.sum(1)
        self._power += float(wanted.double().square().sum())
        self._missed += float((found - wanted).double().square().sum())
        self._heads += (result.contributions - source.contributions).double().square().sum((0, 2, 3))
        pairs = source.queries.shape[3] // 2
        for number, band in enumerate(self._bands):
            chosen = [*band, *(pair + pairs for pair in band)]
            ours, theirs = (
                scaling * each.queries[..., chosen] @ each.keys[..., chosen].transpose(2, 3)
                for each in (source, result)
            )
            self._signal[number] += spread(source.probabilities, ours)
            self._errors[number] += spread(source.probabilities, theirs - ours)
        tiny = torch.finfo(torch.float32).tiny
        logs = [each.probabilities.clamp_min(tiny).log() for each in (source, result)]
        self._divergence += float((source.probabilities * (logs[0] - logs[1])).sum())
        self._queries += source.probabilities[..., 0].numel()

    def means(self) -> dict[str, Any]:
        """Squared errors relative to the output's square: of the layer and by head; the divergence of attention, in
        nats; and the scores' spread and that of their errors, by band and for all pairs.
        """
        return {
            "output": self._missed / self._power,
            "heads": (self._heads / self._power).tolist(),
            "attention_kl": self._divergence / self._queries,
            "signal": [each / self._queries for each in self._signal],
            "errors": [each / self._queries for each in self._errors],
        }


def query_order(source: Any, order: Sequence[int] | None) -> list[int]:
    """Which query head of the source each of the result's is, where K/V heads were merged in this order."""
    count, ratio = source.config.num_key_value_heads, source.config.num_attention_heads
    ratio //= count
    return [head * ratio + each for head in order or range(count) for each in range(ratio)]


def measured(source: Any, result: Any, blocks: Tensor, orders: Sequence[Sequence[int] | None]) -> dict[str, Any]:
    """The errors of every layer, and the divergence of the source's predictions when this layer alone is the result's.

    Args:
        source: a Llama, in float32.
        result: its conversion.
        blocks: token ids [b, l].
        orders: in which each layer's K/V heads were merged; None where every head kept its place.
    """
    layers = source.model.layers
    attention = layers[0].self_attn
    sums = [LayerSums(source.config.num_attention_heads, attention.head_dim // 2) for _ in layers]
    divergences, whole = [0.0] * len(layers), 0.0
    for number, block in enumerate(blocks):
        sys.stderr.write(f"window {number + 1} of {len(blocks)}\n")
        ids = block[None]
        with torch.no_grad():
            inputs, arguments, wanted = _forward(source, ids)
            whole += _divergence(wanted, result(ids, use_cache=False).logits)
            for index, (layer, other) in enumerate(zip(layers, result.model.layers, strict=True)):
                states = layer.input_layernorm(inputs[index])
                own, merged = (
                    parts_of(each.self_attn, states, arguments["position_embeddings"]) for each in (layer, other)
                )
                back = torch.tensor(query_order(source, orders[index])).argsort()
                merged = Parts(*(each[:, back] for each in vars(merged).values()))
                sums[index].add(own, merged, layer.self_attn.scaling)
                kept, layer.self_attn = layer.self_attn, other.self_attn
                divergences[index] += _divergence(wanted, _from(source, inputs[index], index, arguments))
                layer.self_attn = kept
    positions = blocks.numel() - len(blocks)
    each = [each.means() | {"kl": kl / positions} for each, kl in zip(sums, divergences, strict=True)]
    return {"kl": whole / positions, "layers": each}


def _forward(model: Any, ids: Tensor) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """The inputs of every layer, the other arguments that layers get, and the log-probabilities of the next token."""
    inputs: list[Tensor] = []
    arguments: dict[str, Any] = {}

    def note(_: Any, given: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        inputs.append(given[0])
        arguments.update(options)

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    logits = model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return inputs, arguments, logits[:, :-1].log_softmax(-1)


def _from(model: Any, states: Tensor, first: int, arguments: dict[str, Any]) -> Tensor:
    """Logits, where a layer has these inputs."""
    for layer in model.model.layers[first:]:
        states = layer(states, **arguments)
    logits: Tensor = model.lm_head(model.model.norm(states))
    return logits


def _divergence(wanted: Tensor, logits: Tensor) -> float:
    """KL from log-probabilities of the next tokens, summed over positions."""
    return float(kl_div(logits[:, :-1].log_softmax(-1), wanted, log_target=True, reduction="sum").double())


def bands_with_wavelengths(config: Any) -> list[dict[str, float]]:
    """Each band's first and last pair, and the positions in which the last, the slowest, turns once."""
    base, head_dim = config.rope_parameters["rope_theta"], config.head_dim
    return [
        {"first": band[0], "last": band[-1], "wavelength": 2 * math.pi * base ** (2 * band[-1] / head_dim)}
        for band in bands_of(head_dim // 2)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.error_sites",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="of benchmarks.real (%(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="%(default)s")
    parser.add_argument("--method", choices=tuple(METHODS), default="fit", help="of the conversion (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of its calibration text (%(default)s)")
    parser.add_argument("--kind", choices=("prose", "code", "chat"), default="prose", help="of text (%(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens (%(default)s)")
    options = parser.parse_args()
    folder, method = options.folder.expanduser(), METHODS[options.method]
    text = (MIXED, CALIBRATION_TOKENS, options.seed) if method.calibrated else (None,) * 3
    out = converted(Job(*TARGET, options.method, *text), folder).folder
    origin = model_folder(folder, TARGET.model)
    source, result = (load_model(each, torch.float32)[0] for each in (origin, out))
    blocks = held_out_blocks(folder, options.kind, load_tokenizer(origin), WINDOW, options.tokens)
    merged = json.loads((out / PROVENANCE).read_text(encoding="utf-8"))["head_order"] or {}
    orders = [merged.get(f"model.layers.{number}.self_attn") for number in range(len(source.model.layers))]
    found = measured(source, result, blocks, orders)
    record = {
        "command": command_line("benchmarks.real.error_sites"),
        "versions": versions(),
        "weights": fingerprint(origin),
        "groups": TARGET.groups,
        "method": options.method,
        "seed": options.seed,
        "kind": options.kind,
        "tokens": blocks.numel(),
        "bands": bands_with_wavelengths(source.config),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
