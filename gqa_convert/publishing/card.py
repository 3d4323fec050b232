"""The facts that a model card states, prepared for `card.md.jinja`, which holds the sentences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.measuring.results.fields import parse_json
from gqa_convert.measuring.results.kv_heads import in_words, mean_heads
from gqa_convert.merging.methods import METHODS
from gqa_convert.publishing.facts import Base, Facts
from gqa_convert.publishing.headline import headline, speedups
from gqa_convert.publishing.licences import Licence, as_markdown
from gqa_convert.publishing.making import Making, making_of
from gqa_convert.publishing.markup import Markdown, code, fenced, number, plain, significant, table, with_error
from gqa_convert.publishing.measurements import Measured, Scored, Timed
from gqa_convert.publishing.records import Origin, Score
from gqa_convert.publishing.templating import render_card

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "sentencepiece.bpe.model",
)
_FIXED = "The classes of this type in transformers cannot hold fewer K/V heads"
_LAYERWISE = "transformers has no class whose layers differ in their K/V heads"
"""Why a model comes with its own code."""
_LLAMA_3 = 128_256
"""Tokens in the vocabulary of Llama 3."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_AUTO_CLASSES = (
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
    ("ForSpeechSeq2Seq", "AutoModelForSpeechSeq2Seq"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification"),
)


@dataclass(frozen=True)
class Subject:
    """What a card describes.

    Attributes:
        facts: of the checkpoint.
        repo_id: of the Hub repository that it goes to.
        base: the checkpoint on the Hub that it was made from, None if there is none or it is unknown.
        licence: of the model.
        duties: statements that the licence requires of a card, as Markdown.
        measured: results to state.
        revision: branch or tag of the repository, None for its main branch.
    """

    facts: Facts
    repo_id: str
    base: Base | None
    licence: Licence
    duties: tuple[str, ...]
    measured: Measured
    revision: str | None = None


@dataclass(frozen=True)
class Loading:
    """How the model is loaded.

    Attributes:
        python: code that loads it.
        serving: commands that serve it, by the engines that load it without its own code.
        modules: its modelling files, where it needs `trust_remote_code=True`.
        engines: software that loads it otherwise.
        rewritten: model types before and after, where the conversion changed the type.
        reason: why it has modelling files, the beginning of a sentence.
        parallel: degrees of tensor parallelism, in words.
    """

    python: str
    serving: tuple[str, ...]
    modules: tuple[str, ...]
    engines: tuple[str, ...]
    rewritten: tuple[str, str] | None
    reason: str
    parallel: str


@dataclass(frozen=True)
class ScoreSection:
    """One evaluation of the model.

    Attributes:
        text: what was scored.
        rows: of the table of losses; none where no loss is known.
        difference: the model compared with, and the difference in loss with its standard error.
        reference: of the KL divergence.
        nan: how many losses were not finite.
        note: of the evaluation.
        origin: of the results.
    """

    text: str
    rows: tuple[tuple[str, ...], ...]
    difference: tuple[str, str] | None
    reference: str | None
    nan: int
    note: str | None
    origin: Origin


@dataclass(frozen=True)
class TimeSection:
    """One benchmark of the model; the attributes are as in `ScoreSection`."""

    model: str
    detail: str
    rows: tuple[tuple[str, ...], ...]
    spread: str
    origin: Origin


@dataclass(frozen=True)
class Card:
    """Everything that the template prints.

    Attributes:
        name: of the model.
        source: what it was made from, as the beginning of a sentence.
        attention: multi-query or grouped-query.
        change: the K/V heads before and after, and the uptraining.
        headline: the cache, the loss and the speed in a line each.
        duties: statements that the licence requires, as Markdown.
        record: name of the file with the whole record.
        sizes: rows of the table of heads, cache and parameters.
        encoder: what happened to the encoder, None for a decoder.
        loading, making, scores, times: the sections.
        merged: whether heads were merged rather than copied or repeated.
        unmeasured: whether no quality is known.
        uptrained: whether uptraining followed.
        fitted: whether it saw calibration or training text.
        licence: in words, as Markdown.
    """

    name: str
    source: Markdown
    attention: str
    change: str
    headline: tuple[Markdown, ...]
    duties: tuple[Markdown, ...]
    record: str
    sizes: tuple[tuple[str, ...], ...]
    encoder: str | None
    loading: Loading
    making: Making
    scores: tuple[ScoreSection, ...]
    times: tuple[TimeSection, ...]
    merged: bool
    unmeasured: bool
    uptrained: bool
    fitted: bool
    licence: Markdown


def card_text(subject: Subject) -> str:
    """Everything below the front matter, as Markdown."""
    tools: dict[str, Callable[..., object]] = {
        "code": code,
        "codes": lambda names: Markdown(", ".join(map(code, names))),
        "fenced": lambda text, language: Markdown("\n".join(fenced(text, language))),
        "number": number,
        "origin": _origin,
        "table": lambda header, rows: Markdown("\n".join(table(header, rows))),
    }
    return render_card({"card": _card(subject)}, tools)


def _origin(origin: Origin) -> Markdown:
    """The command and the machine of a measurement."""
    command = fenced(origin.command, "sh") if origin.command else ["The command was not recorded."]
    machine = f"Measured on: {plain(origin.machine)}." if origin.machine else "The machine was not recorded."
    return Markdown("\n".join([*command, "", machine]))


def _card(subject: Subject) -> Card:
    facts, measured = subject.facts, subject.measured
    methods = [METHODS.get(record.method or "") for record in facts.chain]
    evaluated = any(each.evaluation for each in facts.trainings)
    return Card(
        name=subject.repo_id.rsplit("/", 1)[-1],
        source=_source(subject),
        attention="multi-query" if facts.groups == 1 else "grouped-query",
        change=_change(facts),
        headline=headline(facts, measured),
        duties=tuple(map(Markdown, subject.duties)),
        record=PROVENANCE,
        sizes=tuple(_sizes(facts)),
        encoder=_encoder(facts),
        loading=_loading(subject),
        making=making_of(facts),
        scores=tuple(map(_score_section, measured.scored)),
        times=tuple(_time_section(each, facts) for each in measured.timed),
        merged=any(method is None or not method.is_exact for method in methods),
        unmeasured=not measured.scored and not evaluated,
        uptrained=bool(facts.trainings),
        fitted=bool(facts.trainings) or any(method is not None and method.trains for method in methods),
        licence=Markdown(as_markdown(subject.licence)),
    )


def _source(subject: Subject) -> Markdown:
    base = subject.base
    if base is None:
        first = subject.facts.chain[0].source
        name = first.id if first else None
        if name is None:
            return Markdown("A checkpoint whose name was not recorded")
        return Markdown(f"A local checkpoint ({code(name.rstrip('/').rsplit('/', 1)[-1])})")
    at = f" at revision {code(base.revision)}" if base.revision else ""
    return Markdown(f"[{plain(base.repo_id)}](https://huggingface.co/{base.repo_id}){at}")


def _change(facts: Facts) -> str:
    before = facts.first_kv_heads
    heads = f"{in_words(facts.groups)} key/value heads per layer"
    heads += f" in place of {before}" if before and before != facts.groups else ""
    tokens = sum(each.tokens or 0 for each in facts.trainings)
    adapters = dict.fromkeys(plain(each.adapters) for each in facts.trainings if each.adapters)
    ways = f" with {' and '.join(adapters)}, merged" if adapters else ""
    return heads + (f", uptrained on {tokens:,} tokens{ways}" if facts.trainings else ", not uptrained")


def _sizes(facts: Facts) -> list[tuple[str, ...]]:
    caches = {
        "kv_bytes_per_token": "K/V-cache bytes per token",
        "cross_kv_bytes_per_encoder_token": "K/V-cache bytes per encoder token",
    }
    rows = [
        ("query heads per layer", number(facts.chain[0].heads, 0), number(facts.plan.heads, 0)),
        ("K/V heads per layer", number(facts.first_kv_heads, 0), in_words(facts.groups)),
    ]
    for key, sizes in facts.plan.cache_bytes().items():
        recorded = getattr(facts.chain[0], key)
        before = recorded.before if recorded else None
        rows.append((caches[key], number(before, 0), number(sizes.after, 0)))
    rows.append(("parameters", "", number(facts.plan.parameters_after, 0)))
    return [(name, before or "not recorded", after) for name, before, after in rows]


def _encoder(facts: Facts) -> str | None:
    crossed = any(layer.attention_kind == "cross" for layer in facts.plan.layers)
    if not crossed and "encoder_layers" not in facts.checkpoint.config:
        return None
    converted = facts.record.encoder is True
    return "the encoder's self-attention is converted too" if converted else "the encoder is unchanged"


def _loading(subject: Subject) -> Loading:
    facts = subject.facts
    model, (helper, variable) = _auto_class(facts), _preprocessor(facts)
    options = f', revision="{subject.revision}"' if subject.revision else ""
    options += ", trust_remote_code=True" if facts.needs_own_code else ""
    lines = [f"from transformers import {', '.join(sorted(filter(None, (model, helper))))}", ""]
    if helper:
        lines.append(f'{variable} = {helper}.from_pretrained("{subject.repo_id}"{options})')
    lines.append(f'model = {model}.from_pretrained("{subject.repo_id}"{options})')
    types = facts.record.model_type or "another type", str(facts.checkpoint.config.get("model_type"))
    return Loading(
        python="\n".join(lines),
        serving=tuple(_serving(subject)),
        modules=tuple(name for name in facts.files if name.endswith(".py")) if facts.needs_own_code else (),
        engines=tuple(sorted(facts.plan.loads_in, key=str.lower))
        or (() if facts.needs_own_code else ("transformers",)),
        rewritten=types if facts.route == "translated" else None,
        reason=_LAYERWISE if facts.plan.family.is_layerwise else _FIXED,
        parallel=facts.plan.tensor_parallel_degrees().in_words(),
    )


def _serving(subject: Subject) -> Iterator[str]:
    """Yield a block of shell commands for each engine that was found to run models of this type."""
    repo_id, engines = subject.repo_id, subject.facts.plan.loads_in
    revision = f" --revision {subject.revision}" if subject.revision else ""
    if "vLLM" in engines:
        code = " --trust-remote-code" if subject.facts.needs_own_code else ""
        yield f"vllm serve {repo_id}{revision}{code}"
    if "llama.cpp" in engines and _llama_cpp_reads_tokenizer(subject.facts):
        name = repo_id.rsplit("/", 1)[-1]
        yield (
            f"hf download {repo_id}{revision} --local-dir {name}\n"
            f"python convert_hf_to_gguf.py {name} --outfile {name}.gguf  # in a checkout of llama.cpp\n"
            f"llama-server -m {name}.gguf"
        )


def _llama_cpp_reads_tokenizer(facts: Facts) -> bool:
    """Whether llama.cpp's converter takes the tokenizer. Of a DeciLM it reads one with byte fallback, as Llama 2 has, or
    one with the vocabulary of Llama 3.
    """
    path = facts.folder / "tokenizer.json"
    if (
        not facts.plan.family.is_layerwise
        or facts.checkpoint.config.get("vocab_size") == _LLAMA_3
        or not path.is_file()
    ):
        return True
    content = parse_json(path)
    model = content.get("model") if isinstance(content, dict) else None
    return isinstance(model, dict) and model.get("byte_fallback") is True


def _preprocessor(facts: Facts) -> tuple[str, str]:
    """The class that prepares the model's input and a variable's name for it; empty where the model has no such
    files.
    """
    if any(name in facts.files for name in _PROCESSOR_FILES):
        return "AutoProcessor", "processor"
    if any(name in facts.files for name in _TOKENIZER_FILES):
        return "AutoTokenizer", "tokenizer"
    return "", ""


def _auto_class(facts: Facts) -> str:
    if facts.plan.family.wrapped:
        return "AutoModelForImageTextToText"
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


def _score_section(scored: Scored) -> ScoreSection:
    evaluation, ours = scored.evaluation, scored.ours
    rows = [_score_row(name, score) for name, score in (("source", scored.source), ("this model", ours)) if score]
    names = {scored.source.model: Markdown("the source")} if scored.source else {}
    reference, difference = evaluation.reference, ours.difference
    shown = None
    if difference is not None and difference[1] is not None:
        shown = names.get(difference[0], code(difference[0])), with_error(difference[1], difference[2])
    return ScoreSection(
        text=evaluation.text,
        rows=tuple(rows) if any(any(row[1:]) for row in rows) else (),
        difference=shown,
        reference=None if reference is None or ours.kl is None else names.get(reference, code(reference)),
        nan=ours.nan,
        note=ours.note,
        origin=evaluation.origin,
    )


def _score_row(name: str, score: Score) -> tuple[str, ...]:
    return (
        name,
        with_error(score.loss, score.loss_error),
        significant(score.perplexity),
        with_error(score.bits_per_byte, score.bits_error),
        with_error(score.kl, score.kl_error),
        "" if score.top1 is None else f"{score.top1:.1%}",
        number(score.tokens, 0),
    )


def _time_section(timed: Timed, facts: Facts) -> TimeSection:
    benchmark, faster = timed.benchmark, speedups(timed, facts)
    rows = tuple(
        (
            in_words(each.groups),
            number(each.batch, 0),
            number(each.context, 0),
            significant(each.decode),
            significant(each.low),
            significant(each.high),
            significant(each.tokens_per_second),
            f"{faster[each.setting]:.2f}" if each.groups == facts.groups and each.setting in faster else "",
        )
        for each in sorted(timed.timings, key=lambda each: (each.setting, -mean_heads(each.groups)))
    )
    return TimeSection(benchmark.model, benchmark.detail, rows, benchmark.spread, benchmark.origin)
