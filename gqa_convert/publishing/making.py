"""The part of a card that says how the checkpoint was made: conversions, uptraining, commands, versions."""

import json
import shlex

from gqa_convert.measuring.results.fields import Fields, printable
from gqa_convert.publishing.facts import Facts
from gqa_convert.publishing.markup import code, fenced, number, plain, table

_METHODS = {
    "mean": "the K/V heads of a group were replaced by their mean, as in the GQA paper (Ainslie et al., 2023, section 2.1)",
    "first": "of the K/V heads of a group the first was kept",
    "random": "the K/V heads were replaced by random ones, as in the GQA paper's ablation",
    "align": "the K/V heads of a group were rotated towards each other, the rotations absorbed by queries and outputs, then averaged",
    "factor": "the K/V heads of a group were factorised together, the factors absorbed by queries and outputs",
    "fit": "the K/V heads of a group were factorised together and fitted, layer after layer, to what the source's layers give on a calibration text",
    "repeat": "K/V heads were repeated exactly; the model computes what its source does",
    "copy": "nothing was changed; the model computes what its source does",
}
_HYPERPARAMETERS = (
    "objective",
    "optimizer",
    "learning_rate",
    "schedule",
    "tokens_per_step",
    "sequence_length",
    "precision",
    "trainable",
    "teacher",
    "distillation_weight",
    "seed",
)


def made_of(facts: Facts) -> list[str]:
    """The section's lines."""
    lines = ["## How it was made", ""]
    for record in facts.chain:
        lines += _conversion(record)
        for training in record.parts("uptraining"):
            lines += _training(training)
    commands = [command for record in facts.chain for command in _commands(record)]
    recorded = [shlex.join([printable(word) for word in command]) for command in commands if command]
    lines += [*fenced("\n".join(recorded), "sh"), ""] if recorded else []
    if missing := sum(1 for command in commands if not command):
        which = "The command was" if len(commands) == 1 else f"{missing} of {len(commands)} commands were"
        lines += [f"{which} not recorded: the work was started from Python, or by an older version.", ""]
    return [*lines, f"Versions: {_versions(facts)}."]


def _conversion(record: Fields) -> list[str]:
    method = record.text("method") or "not recorded"
    before, after = record.count("source_kv_heads"), record.need_groups()
    lines = [
        f"**Conversion** from {number(before, 0) or 'an unrecorded number of'} to {after} K/V heads per layer, method {code(method)}"
    ]
    lines[0] += f": {_METHODS[method]}." if method in _METHODS else "."
    calibration = record.part("calibration")
    if calibration is not None:
        text = calibration.text("text")
        lines.append(f"Calibration text: {code(text) if text else 'not recorded'}.")
        divergence = calibration.part("kl")
        start, end = (divergence.number(key) if divergence else None for key in ("before", "after"))
        if start is not None and end is not None:
            together = f", {number(start)} before all layers were trained on it together" if end < start else ""
            lines.append(
                f"On other parts of that text its predictions diverged from the source's by {number(end)} nats per token{together}."
            )
    elif method not in ("repeat", "copy"):
        lines.append("No calibration text was used.")
    errors = record.numbers("merge_error")
    lines += ["", *_merge_errors(errors)] if errors and method not in ("repeat", "copy") else []
    return [*lines, ""]


def _merge_errors(errors: dict[str, float]) -> list[str]:
    """By the last word of what they are the error of, and by the last two of a bias: layers are many."""
    parts: dict[str, list[float]] = {}
    for name, value in errors.items():
        stem = name.removesuffix(".weight")
        parts.setdefault(".".join(stem.split(".")[-2 if stem.endswith(".bias") else -1 :]), []).append(value)
    rows = [
        (
            code(part),
            number(len(values), 0),
            number(min(values)),
            number(sum(values) / len(values)),
            number(max(values)),
        )
        for part, values in sorted(parts.items())
    ]
    return [
        "Relative error of the merge, which compares within one method only:",
        "",
        *table(("of", "count", "least", "mean", "greatest"), rows),
    ]


def _training(training: Fields) -> list[str]:
    tokens, recipe = training.count("tokens"), training.part("recipe")
    lines = [
        f"**Uptraining** on {tokens:,} tokens."
        if tokens is not None
        else "**Uptraining**; the number of tokens was not recorded."
    ]
    if recipe is not None:
        sources = [f"{code(each.text('source') or 'not recorded')}{_options(each)}" for each in recipe.parts("data")]
        lines.append(f"Text: {', '.join(sources) or 'not recorded'}.")
        values = [(key, recipe.record.get(key)) for key in _HYPERPARAMETERS]
        lines.append(
            "Settings: "
            + ", ".join(f"{plain(key)} {code(_plain_value(value))}" for key, value in values if value is not None)
            + "."
        )
    found = training.part("evaluation")
    if found is not None and found.number("start") is not None and found.number("final") is not None:
        source, share = found.number("source"), found.number("recovered_share")
        lines.append(
            f"Loss on the recipe's evaluation text: {number(found.number('start'))} at the start, {number(found.number('final'))} at the end"
            + (f", {number(source)} of the source" if source is not None else "")
            + " (nats per token)"
            + (f"; {share:.1%} of the gap closed." if share is not None else ".")
        )
    return [*lines, ""]


def _options(source: Fields) -> str:
    """What a dataset was read by, beside its name, where it is not the usual."""
    usual = {"split": "train", "text_field": "text"}
    said = [
        f"{key} {code(_plain_value(source.record[key]))}"
        for key in ("name", "split", "revision")
        if _unusual(source.record.get(key), usual.get(key))
    ]
    return f" ({', '.join(said)})" if said else ""


def _unusual(value: object, usual: object) -> bool:
    return value is not None and value != usual


def _plain_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _commands(record: Fields) -> list[list[str] | None]:
    return [record.strings("command"), *(each.strings("command") for each in record.parts("uptraining"))]


def _versions(facts: Facts) -> str:
    """Of each library those that took part, in the order of the work."""
    found: dict[str, list[str]] = {}
    for record in (*facts.chain, *facts.trainings):
        machine = record.part("machine")
        versions = (machine.part("versions") if machine else None) or record.part("versions") or Fields({}, "")
        for name in versions.record:
            text = versions.text(name)
            if text and text not in found.setdefault(name, []):
                found[name].append(text)
    return ", ".join(f"{plain(name)} {plain(' and '.join(texts))}" for name, texts in found.items()) or "not recorded"
