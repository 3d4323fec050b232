"""Where a converted model loses what its source finds: one layer at a time is exchanged between the two.

    python -m benchmarks.real.where_lost SOURCE CONVERTED OUT.json [--lengths 512 2048] [--texts 4] [--device cuda]

Of each layer the keys (with the queries that they were fitted to: a head's pattern) or the values (with the output
projection: its content) are restored in the converted model, or merged in the source. Each time the negative
log-likelihood of the answers to the questions of `evaluate --retrieval` is taken, in nats per answer. Both models are of
one stock type; the merged K/V heads are repeated, so that both have the source's shapes. The output is written after each
exchange, and a command that was killed goes on when it is repeated.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.pages import table
from gqa_convert.families.loading import load_model, load_tokenizer
from gqa_convert.measuring.evaluation.retrieval_texts import RetrievalText, make_text

PARTS = {"keys": ("q_proj", "k_proj"), "values": ("v_proj", "o_proj")}
Weights = dict[str, Tensor]


def repeated(merged: Mapping[str, Tensor], source: Mapping[str, Tensor], head_dim: int) -> Weights:
    """Merged weights in the source's shapes: each K/V head stands in the place of all that it replaces."""
    found = {}
    for name, weights in merged.items():
        if weights.shape != source[name].shape:
            heads = weights.unflatten(0, (-1, head_dim))
            weights = heads.repeat_interleave(len(source[name]) // len(weights), 0).flatten(0, 1)
        found[name] = weights.clone()
    return found


def of_part(weights: Mapping[str, Tensor], layer: int, part: str) -> Weights:
    """The weights of a layer's keys or values, by name."""
    starts = tuple(f"model.layers.{layer}.self_attn.{name}." for name in PARTS[part])
    return {name: each for name, each in weights.items() if name.startswith(starts)}


def answer_losses(model: Any, tokenizer: Any, text: RetrievalText) -> list[float]:
    """The negative log-likelihood of each answer of a text, in nats."""
    answers = [tokenizer(" " + each.answer, add_special_tokens=False)["input_ids"] for each in text.questions]
    rows = [
        torch.tensor(question.prompt[text.shared :] + answer)
        for question, answer in zip(text.questions, answers, strict=True)
    ]
    read = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    with torch.inference_mode():
        beginning = torch.tensor([text.questions[0].prompt[: text.shared]], device=model.device)
        cache = model(beginning, use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(len(rows))
        logits = model(read, past_key_values=cache).logits.float().log_softmax(-1)
    losses = []
    for row, answer, scores in zip(rows, answers, logits, strict=True):
        predicted = scores[len(row) - len(answer) - 1 : len(row) - 1]
        losses.append(-float(predicted.gather(1, read.new_tensor(answer)[:, None]).sum()))
    return losses


def measure(
    models: Mapping[str, tuple[Any, Weights]], tokenizer: Any, texts: Sequence[RetrievalText], results: dict[str, Any]
) -> Any:
    """Add the losses of every exchange that `results` does not hold, and yield after each.

    Args:
        models: `source` and `converted`, each with the weights of the other.
        tokenizer: of both.
        texts: with questions.
        results: losses of answers by length, by model and by what was exchanged.
    """
    for length in dict.fromkeys(text.length for text in texts):
        for start, (model, others) in models.items():
            own = {name: each.clone() for name, each in model.state_dict().items()}
            for layer in range(-1, model.config.num_hidden_layers):
                for part in PARTS if layer >= 0 else ("nothing",):
                    name = f"{part} {layer}" if layer >= 0 else part
                    known = results.setdefault(str(length), {}).setdefault(start, {})
                    if name in known:
                        continue
                    changed = of_part(others, layer, part) if layer >= 0 else {}
                    model.load_state_dict(changed, strict=False)
                    here = [text for text in texts if text.length == length]
                    known[name] = [loss for text in here for loss in answer_losses(model, tokenizer, text)]
                    model.load_state_dict({key: own[key] for key in changed}, strict=False)
                    yield


def summary(results: Mapping[str, Any]) -> str:
    """A table of the changes in nats per answer with standard errors over answers, a row for each length and layer."""
    lines = []
    for length, by_model in results.items():
        gap = np.subtract(by_model["converted"]["nothing"], by_model["source"]["nothing"])
        lines.append([f"{int(length):,}", "all", f"{gap.mean():.2f}", "", "", ""])
        layers = dict.fromkeys(name.split()[-1] for name in by_model["converted"] if name != "nothing")
        for layer in layers:
            cells = []
            for known in by_model.values():
                for part in PARTS:
                    change = np.subtract(known.get(f"{part} {layer}", [math.nan]), known["nothing"])
                    error = change.std(ddof=1) / len(change) ** 0.5 if len(change) > 1 else math.nan
                    cells.append(f"{change.mean():+.2f} ± {error:.2f}")
            lines.append([f"{int(length):,}", layer, *cells])
    header = ["tokens", "layer", *(f"{part} {how}" for how in ("restored", "merged") for part in PARTS)]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("converted", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--texts", type=int, default=4, help="of each length, with eight questions each (%(default)s)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    models = [load_model(options.source, torch.bfloat16)[0].eval() for _ in range(2)]
    weights = models[0].state_dict()
    merged = load_model(options.converted, torch.bfloat16)[0].state_dict()
    merged = repeated(merged, weights, models[0].config.head_dim)
    weights = {name: each.clone() for name, each in weights.items()}
    models[1].load_state_dict(merged)
    tokenizer = load_tokenizer(options.source)
    texts = [make_text(tokenizer, length, number, 0) for length in options.lengths for number in range(options.texts)]
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    named = {
        "converted": (models[1].to(options.device), weights),
        "source": (models[0].to(options.device), merged),
    }
    for _ in measure(named, tokenizer, texts, results):
        options.out.write_text(json.dumps(results), encoding="utf-8")
    print(summary(results))


if __name__ == "__main__":
    main()
