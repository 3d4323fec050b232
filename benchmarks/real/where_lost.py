"""Where a converted model loses what its source finds: one layer at a time is exchanged between the
two.

    python -m benchmarks.real.where_lost SOURCE CONVERTED OUT.json [--parts keys values] [--by
    answers] [--device cuda] python -m benchmarks.real.where_lost SOURCE CONVERTED OUT.json --parts
    layer --by answers records prose --restore 6 python -m benchmarks.real.where_lost --plot
    OUT.json where-lost.svg

Of each layer the keys (with the queries that they were fitted to: a head's pattern), the values
(with the output projection: its content) or both are restored in the converted model, or merged in
the source. Each time one takes the negative log-likelihood of the answers to the questions of
`evaluate --retrieval`, in nats per answer, or the divergence from the source on blocks of made-up
records or of prose, in nats per token. Both models are of one stock type; the merged K/V heads are
repeated, so that both have the source's shapes. The output is written after each exchange, and a
command that was killed goes on when it is repeated.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.pages import table
from gqa_convert.conversion.calibration.made_up_records import record_blocks
from gqa_convert.data.order import Integers
from gqa_convert.families.loading import cache_name, load_model, load_tokenizer
from gqa_convert.measuring.evaluation.retrieval_texts import RetrievalText, make_text

PARTS = {
    "keys": ("q_proj", "k_proj"),
    "values": ("v_proj", "o_proj"),
    "layer": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
BLOCKS, LENGTH = 8, 2048
"""Of the text on which divergence is measured."""
CANDIDATES = 12
"""Layers, the best ones alone, among which several are restored together."""
Weights = dict[str, Tensor]
Score = Callable[[Any], list[float]]
"""What a model loses, by answer or by block."""


def repeated(merged: Mapping[str, Tensor], source: Mapping[str, Tensor], head_dim: int) -> Weights:
    """Merged weights in the source's shapes: each K/V head stands in the place of all that it
    replaces.
    """
    found = {}
    for name, weights in merged.items():
        if weights.shape != source[name].shape:
            heads = weights.unflatten(0, (-1, head_dim))
            weights = heads.repeat_interleave(len(source[name]) // len(weights), 0).flatten(0, 1)
        found[name] = weights.clone()
    return found


def tokens_of_file(file: Path, tokenizer: Any, most: int) -> Integers:
    """The tokens of the documents in a file of `text`, at most so many."""
    ids: list[int] = []
    for line in file.open():
        ids += [
            *tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        if len(ids) >= most:
            break
    return np.array(ids[:most], np.int64)


def of_part(weights: Mapping[str, Tensor], layer: int, part: str) -> Weights:
    """The weights of a layer's keys or values, by name."""
    starts = tuple(f"model.layers.{layer}.self_attn.{name}." for name in PARTS[part])
    return {name: each for name, each in weights.items() if name.startswith(starts)}


def answer_losses(model: Any, tokenizer: Any, text: RetrievalText) -> list[float]:
    """The negative log-likelihood of each answer of a text, in nats."""
    answers = [
        tokenizer(" " + each.answer, add_special_tokens=False)["input_ids"]
        for each in text.questions
    ]
    rows = [
        torch.tensor(question.prompt[text.shared :] + answer)
        for question, answer in zip(text.questions, answers, strict=True)
    ]
    read = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    with torch.inference_mode():
        beginning = torch.tensor([text.questions[0].prompt[: text.shared]], device=model.device)
        name = cache_name(model)
        cache = getattr(model(beginning, use_cache=True, logits_to_keep=1), name)
        cache.batch_repeat_interleave(len(rows))
        logits = model(read, **{name: cache}).logits.float().log_softmax(-1)
    losses = []
    for row, answer, scores in zip(rows, answers, logits, strict=True):
        predicted = scores[len(row) - len(answer) - 1 : len(row) - 1]
        losses.append(-float(predicted.gather(1, read.new_tensor(answer)[:, None]).sum()))
    return losses


def divergences(model: Any, source: list[Tensor], blocks: Tensor) -> list[float]:
    """KL(source || model) of each block, in nats per token, from the source's log-probabilities
    [L, vocabulary].
    """
    found = []
    with torch.inference_mode():
        for block, wanted in zip(blocks, source, strict=True):
            given = model(block[None]).logits[0].float().log_softmax(-1)
            found.append(float((wanted.float().exp() * (wanted.float() - given)).sum(-1).mean()))
    return found


def measure(
    models: Mapping[str, tuple[Any, Weights]],
    parts: list[str],
    name: str,
    score: Score,
    results: dict[str, Any],
) -> Iterator[None]:
    """Add what every exchange does to a score, unless `results` holds it, and yield after each.

    Args:
        models: `source` and `converted`, each with the weights of the other.
        parts: to exchange, of PARTS.
        name: of the score.
        score: of a model.
        results: scores by their names, by model and by what was exchanged.
    """
    for start, (model, others) in models.items():
        known = results.setdefault(name, {}).setdefault(start, {})
        exchanges = [("nothing", -1)] + [
            (part, layer) for layer in range(model.config.num_hidden_layers) for part in parts
        ]
        for part, layer in exchanges:
            label = f"{part} {layer}" if layer >= 0 else part
            if label not in known:
                changed = of_part(others, layer, part) if layer >= 0 else {}
                known[label] = _exchanged(model, changed, score)
                yield


def _exchanged(model: Any, changed: Weights, score: Score) -> list[float]:
    """The score of a model with these weights, which are its own again afterwards."""
    own = model.state_dict()
    kept = {name: own[name].clone() for name in changed}
    model.load_state_dict(changed, strict=False)
    found = score(model)
    model.load_state_dict(kept, strict=False)
    return found


def restore(
    model: Any, source: Weights, count: int, score: Score, alone: Mapping[str, list[float]]
) -> list[Any]:
    """So many layers restored one after the other, each time the one that leaves least; with what
    is left.

    Args:
        model: the converted one.
        source: weights of the source.
        count: layers to restore.
        score: of the model.
        alone: scores with one layer restored.
    """
    layers = [int(label.split()[1]) for label in alone if label.startswith("layer")]
    layers = sorted(layers, key=lambda layer: np.mean(alone[f"layer {layer}"]))[:CANDIDATES]
    chosen: list[Any] = []
    weights: Weights = {}
    for _ in range(count):
        left = {}
        for layer in layers:
            left[layer] = float(
                np.mean(_exchanged(model, weights | of_part(source, layer, "layer"), score))
            )
        best = min(left, key=lambda layer: left[layer])
        layers.remove(best)
        weights |= of_part(source, best, "layer")
        chosen.append([best, left[best]])
    return chosen


def summary(results: Mapping[str, Any]) -> str:
    """A table of the changes with standard errors, a row for each score and layer."""
    lines = []
    for name, by_model in results.items():
        models = [by_model["converted"], by_model["source"]]
        gap = np.mean(models[0]["nothing"]) - np.mean(models[1]["nothing"])
        parts = [part for part in PARTS if f"{part} 0" in models[0]]
        lines.append([name, "all", f"{gap:.3g}", *[""] * (2 * len(parts) - 1)])
        layers = dict.fromkeys(label.split()[-1] for label in models[0] if label != "nothing")
        for layer in layers:
            cells = []
            for known in models:
                for part in parts:
                    change = np.subtract(known[f"{part} {layer}"], known["nothing"])
                    error = change.std(ddof=1) / len(change) ** 0.5 if len(change) > 1 else 0.0
                    cells.append(f"{change.mean():+.3g} ± {error:.2g}")
            lines.append([name, layer, *cells])
    header = [
        "score",
        "layer",
        *(f"{part} {how}" for how in ("restored", "merged") for part in parts),
    ]
    return table(header, lines)


def draw(results: Mapping[str, Any], out: Path) -> None:
    """A panel for each score of whole layers: what restoring a layer takes away, and what
    merging it alone adds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    for (name, by_model), axes in zip(
        results.items(), figure.subplots(len(results), 1, sharex=True), strict=True
    ):
        for place, (start, label) in enumerate(
            (("converted", "restored"), ("source", "merged alone"))
        ):
            nothing = np.mean(by_model[start]["nothing"])
            changes = {
                int(key.split()[1]): np.mean(each) - nothing
                for key, each in by_model[start].items()
                if key.startswith("layer")
            }
            axes.bar(
                [layer + 0.4 * place - 0.2 for layer in changes],
                list(changes.values()),
                0.4,
                label=label,
            )
        axes.set_title(name, loc="left")
    figure.supylabel("change in nats per answer, or per token")
    axes.set_xlabel("layer")
    axes.legend(loc="lower left")
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, help="SOURCE CONVERTED OUT.json, or OUT.json PLOT.svg"
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw what was measured of whole layers"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["keys", "values"])
    parser.add_argument(
        "--by", nargs="+", choices=("answers", "records", "prose"), default=["answers"]
    )
    parser.add_argument(
        "--restore", type=int, default=0, metavar="LAYERS", help="restore several layers together"
    )
    parser.add_argument("--prose", type=Path, help="a file of `text`")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[512, 2048], help="of texts with questions"
    )
    parser.add_argument(
        "--texts",
        type=int,
        default=4,
        help="of each length, with eight questions each (%(default)s)",
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    out = options.paths[-1]
    if options.plot:
        draw(json.loads(options.paths[0].read_text(encoding="utf-8")), out)
        return
    source, converted = options.paths[:2]
    models = [load_model(source, torch.bfloat16)[0].eval() for _ in range(2)]
    weights = models[0].state_dict()
    merged = load_model(converted, torch.bfloat16)[0].state_dict()
    merged = repeated(merged, weights, models[0].config.head_dim)
    weights = {name: each.clone() for name, each in weights.items()}
    models[1].load_state_dict(merged)
    named = {
        "converted": (models[1].to(options.device), weights),
        "source": (models[0].to(options.device), merged),
    }
    results = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    for name, score in _scores(options, models[0], load_tokenizer(source)):
        for _ in measure(named, options.parts, name, score, results):
            out.write_text(json.dumps(results), encoding="utf-8")
        if options.restore:
            alone = results[name]["converted"]
            results[name]["restored"] = restore(models[1], weights, options.restore, score, alone)
            out.write_text(json.dumps(results), encoding="utf-8")
    print(summary(results))


def _scores(
    options: argparse.Namespace, source: Any, tokenizer: Any
) -> Iterator[tuple[str, Score]]:
    """The scores that are asked for, by name."""
    if "answers" in options.by:
        for length in options.lengths:
            texts = [make_text(tokenizer, length, number) for number in range(options.texts)]
            yield f"answers {length}", partial(_answers, tokenizer=tokenizer, texts=texts)
    blocks = {}
    if "records" in options.by:
        blocks["records"] = record_blocks(tokenizer, LENGTH, BLOCKS, 99)
    if "prose" in options.by:
        blocks["prose"] = tokens_of_file(options.prose, tokenizer, LENGTH * BLOCKS)
    for name, tokens in blocks.items():
        rows = torch.from_numpy(tokens).view(BLOCKS, LENGTH).to(options.device)
        with torch.inference_mode():
            wanted = [
                source(row[None]).logits[0].float().log_softmax(-1).bfloat16() for row in rows
            ]
        yield name, partial(divergences, source=wanted, blocks=rows)


def _answers(model: Any, tokenizer: Any, texts: list[RetrievalText]) -> list[float]:
    return [loss for text in texts for loss in answer_losses(model, tokenizer, text)]


if __name__ == "__main__":
    main()
