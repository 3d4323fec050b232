"""The text of a model card."""

from dataclasses import dataclass

from gqa_convert.conversion.provenance import PROVENANCE
from gqa_convert.publishing.facts import Base, Facts
from gqa_convert.publishing.licences import Licence, as_markdown
from gqa_convert.publishing.making import made_of
from gqa_convert.publishing.markup import code, fenced, number, plain, table, with_error
from gqa_convert.publishing.measurements import Measured, Scored, Timed

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "sentencepiece.bpe.model",
)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_AUTO_CLASSES = (
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
    ("ForSpeechSeq2Seq", "AutoModelForSpeechSeq2Seq"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification"),
)


@dataclass(frozen=True)
class Subject:
    """What a card speaks of.

    Attributes:
        base: what it was made from, as far as it is on the Hub.
        duties: what its licence makes a card say, as Markdown.
        revision: of the repository, if it is not its main branch.
    """

    facts: Facts
    repo_id: str
    base: Base | None
    licence: Licence
    duties: tuple[str, ...]
    measured: Measured
    revision: str | None = None


def card_text(subject: Subject) -> str:
    """Everything below the front matter, as Markdown."""
    sections = [
        _opening(subject),
        _heads(subject),
        _loading(subject),
        made_of(subject.facts),
        _measurements(subject.measured),
        _limitations(subject),
        _licence(subject),
    ]
    return "\n".join("\n".join(lines) + "\n" for lines in sections)


def _opening(subject: Subject) -> list[str]:
    facts = subject.facts
    before = facts.first_kv_heads
    kind = "multi-query attention" if facts.groups == 1 else "grouped-query attention"
    change = f"{facts.groups} key/value heads per layer" + (
        f" in place of {before}" if before and before != facts.groups else ""
    )
    trained = f", uptrained on {_trained_tokens(facts):,} tokens" if facts.trainings else ", not uptrained since"
    lines = [f"# {plain(subject.repo_id.rsplit('/', 1)[-1])}", ""]
    lines += [f"{_source(subject)}, converted to {kind}: {change}{trained}.", ""]
    lines += [f"{each}\n" for each in subject.duties]
    return [
        *lines,
        f"Made by gqa-convert. Every figure below was recorded or measured by it; {code(PROVENANCE)} holds the whole record.",
    ]


def _source(subject: Subject) -> str:
    base = subject.base
    if base is None:
        first = subject.facts.chain[0].part("source")
        name = first.text("id") if first else None
        return (
            f"A local checkpoint ({code(name.rstrip('/').rsplit('/', 1)[-1])})"
            if name
            else "A checkpoint whose name was not recorded"
        )
    at = f" at revision {code(base.revision)}" if base.revision else ""
    return f"[{plain(base.repo_id)}](https://huggingface.co/{base.repo_id}){at}"


def _trained_tokens(facts: Facts) -> int:
    return sum(each.count("tokens") or 0 for each in facts.trainings)


def _heads(subject: Subject) -> list[str]:
    facts = subject.facts
    caches = {
        "kv_bytes_per_token": "K/V-cache bytes per token",
        "cross_kv_bytes_per_encoder_token": "K/V-cache bytes per encoder token",
    }
    rows = [
        ("query heads per layer", number(facts.chain[0].count("heads"), 0), number(facts.plan.heads, 0)),
        ("K/V heads per layer", number(facts.first_kv_heads, 0), number(facts.groups, 0)),
    ]
    for key, sizes in facts.plan.cache_bytes().items():
        recorded = facts.chain[0].part(key)
        rows.append(
            (caches[key], number(recorded.number("before") if recorded else None, 0), number(sizes["after"], 0))
        )
    rows.append(("parameters", "", number(facts.plan.parameters_after, 0)))
    filled = [(name, before or "not recorded", after) for name, before, after in rows]
    layers = (
        "its encoder's self-attention too" if facts.record.record.get("encoder") is True else "its encoder is unchanged"
    )
    encoder = (
        [f"Of an encoder-decoder model: {layers}.", ""]
        if "encoder_layers" in facts.checkpoint.config or _has_cross(facts)
        else []
    )
    return [
        *table(("", "source", "this model"), filled),
        "",
        *encoder,
        "Bytes are computed from the shapes of the weights, in their type.",
    ]


def _has_cross(facts: Facts) -> bool:
    return any(layer.attention_kind == "cross" for layer in facts.plan.layers)


def _loading(subject: Subject) -> list[str]:
    facts, own = subject.facts, subject.facts.needs_own_code
    options = (f', revision="{subject.revision}"' if subject.revision else "") + (
        ", trust_remote_code=True" if own else ""
    )
    model = _auto_class(facts)
    helper, variable = ("", "")
    if any(name in facts.files for name in _PROCESSOR_FILES):
        helper, variable = "AutoProcessor", "processor"
    elif any(name in facts.files for name in _TOKENIZER_FILES):
        helper, variable = "AutoTokenizer", "tokenizer"
    lines = [f"from transformers import {', '.join(sorted(filter(None, (model, helper))))}", ""]
    if helper:
        lines.append(f'{variable} = {helper}.from_pretrained("{subject.repo_id}"{options})')
    lines.append(f'model = {model}.from_pretrained("{subject.repo_id}"{options})')
    if own:
        files = ", ".join(code(name) for name in facts.files if name.endswith(".py"))
        why = f"transformers' own classes of this type hold no fewer K/V heads: the model brings its code ({files}). Read it first."
    else:
        engines = ", ".join(sorted(facts.plan.loads_in, key=str.lower)) or "transformers"
        why = f"No custom code is needed. Software that has classes for it: {engines}."
    if facts.route == "translated":
        was, now = facts.record.text("model_type"), facts.checkpoint.config.get("model_type")
        why += f" Its weights were rewritten from {code(was or 'another type')} to {code(str(now))}, which computes the same."
    return ["## How to load it", "", *fenced("\n".join(lines), "python"), "", why]


def _auto_class(facts: Facts) -> str:
    classes = facts.checkpoint.config.get("architectures") or [""]
    own = facts.checkpoint.config.get("auto_map")
    named = (
        {str(home).rsplit(".", 1)[-1]: auto for auto, home in own.items() if auto.startswith("AutoModel")}
        if isinstance(own, dict)
        else {}
    )
    if str(classes[0]) in named:
        found = named[str(classes[0])]
    else:
        found = next((auto for end, auto in _AUTO_CLASSES if str(classes[0]).endswith(end)), "AutoModel")
    return found if found.isidentifier() else "AutoModel"


def _measurements(measured: Measured) -> list[str]:
    lines = ["## What was measured", ""]
    if not measured.scored:
        lines += ["Loss and tasks: not measured.", ""]
    for scored in measured.scored:
        lines += _evaluation(scored)
    if not measured.timed:
        lines += ["Decode speed: not measured.", ""]
    for timed in measured.timed:
        lines += _benchmark(timed)
    return lines[:-1]


def _evaluation(scored: Scored) -> list[str]:
    evaluation, rows = scored.evaluation, []
    for name, score in (("source", scored.source), ("this model", scored.ours)):
        if score is not None:
            rows.append(
                (
                    name,
                    with_error(score.loss, score.loss_error),
                    number(score.perplexity, 3),
                    with_error(score.bits_per_byte, score.bits_error),
                    with_error(score.kl, score.kl_error),
                    number(score.top1, 4),
                    number(score.tokens, 0),
                )
            )
    header = (
        "",
        "loss, nats per token",
        "perplexity",
        "bits per byte",
        "KL from the reference",
        "same first choice",
        "tokens",
    )
    names = {scored.source.model: "the source"} if scored.source else {}
    lines = []
    if any(any(row[1:]) for row in rows):
        lines += [f"On {code(evaluation.text)}, plus or minus one standard error:", "", *table(header, rows), ""]
        to = scored.ours.difference
        if to is not None and to[1] is not None:
            of = names.get(to[0], code(to[0]))
            lines += [f"Paired difference in loss to {of}: {with_error(to[1], to[2])} nats per token.", ""]
        reference = evaluation.reference
        if reference is not None and scored.ours.kl is not None:
            lines += [f"The reference is {names.get(reference, code(reference))}.", ""]
    if scored.ours.nan:
        lines += [f"{scored.ours.nan:,} losses were not finite.", ""]
    if scored.ours.note:
        lines += [f"The evaluation says: {plain(scored.ours.note)}", ""]
    if scored.ours.tasks:
        before = {
            (task, metric): (value, error)
            for task, metric, value, error in (scored.source.tasks if scored.source else ())
        }
        tasks = [
            (code(task), code(metric), with_error(*before.get((task, metric), (None, None))), with_error(value, error))
            for task, metric, value, error in scored.ours.tasks
        ]
        lines += ["Tasks of lm-eval:", "", *table(("task", "metric", "source", "this model"), tasks), ""]
    return [*lines, *_origin(evaluation.origin.command, evaluation.origin.machine)]


def _benchmark(timed: Timed) -> list[str]:
    benchmark = timed.benchmark
    header = ("K/V heads per layer", "batch", "context", "ms per step", "from", "to", "tokens per second")
    rows = [
        (
            number(each.groups, 0),
            number(each.batch, 0),
            number(each.context, 0),
            number(each.decode, 3),
            number(each.low, 3),
            number(each.high, 3),
            number(each.tokens_per_second, 1),
        )
        for each in sorted(timed.timings, key=lambda each: (each.setting, -each.groups))
    ]
    return [
        f"Decode time of {code(benchmark.model)}" + (f" ({plain(benchmark.detail)})" if benchmark.detail else "") + ":",
        "",
        *table(header, rows),
        "",
        f"From and to: {plain(benchmark.spread)}.",
        "",
        *_origin(benchmark.origin.command, benchmark.origin.machine),
    ]


def _origin(command: str | None, machine: str | None) -> list[str]:
    on = f"Measured on: {plain(machine)}." if machine else "Measured on a machine that was not recorded."
    return [*(fenced(command, "sh") if command else ["The command was not recorded."]), "", on, ""]


def _limitations(subject: Subject) -> list[str]:
    facts, measured = subject.facts, subject.measured
    lines = []
    methods = {record.text("method") for record in facts.chain}
    merged = not methods <= {"copy", "repeat"}
    if merged:
        lines.append(
            "Merging heads changes what the model computes. What the source was tested for is not tested here unless it stands above."
        )
    if not measured.scored and not _losses(facts):
        lines.append("Its quality was not measured: evaluate it before use.")
    if merged and not facts.trainings:
        lines.append("It was not uptrained after the conversion.")
    if "fit" in methods or facts.trainings:
        lines.append(
            "It was fitted to the texts named above; on texts of other kinds or languages it may have lost more."
        )
    lines.append("Biases, risks and limits of the source are those of this model too.")
    return ["## Limitations", "", *(f"- {each}" for each in lines)]


def _losses(facts: Facts) -> bool:
    return any(each.part("evaluation") for each in facts.trainings)


def _licence(subject: Subject) -> list[str]:
    return [
        "## Licence",
        "",
        as_markdown(subject.licence),
        "",
        "Changed from the source: the numbers of heads and the weights, as said above.",
    ]
