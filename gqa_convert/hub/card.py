"""The model card: its metadata, and the text that `card.md.jinja` makes of a `CardContext`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.hub.converted import Converted
from gqa_convert.hub.licenses import License, Words, find_license, reminders
from gqa_convert.hub.markup import one_line, render
from gqa_convert.hub.measured import Measured, read_measured
from gqa_convert.hub.options import HUB_ID, PublishOptions
from gqa_convert.hub.readme import check_replaceable, read_readme, sign, stated_by_source
from gqa_convert.merging.methods import METHODS, MergeMethod

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
}
_METRICS = {
    "loss": "loss, nats per token",
    "perplexity": "perplexity per token",
    "bits_per_byte": "bits per byte",
    "word_error_rate": "word error rate",
    "kl": "KL divergence from the reference, nats per token",
}


@dataclass(frozen=True)
class CardContext:
    """What the card is made from; `base` is the Hub id and the commit of the source, each None where it is unknown."""

    options: PublishOptions
    model: Converted
    base: tuple[str | None, str | None]
    license: License
    stated: Words
    measured: Measured
    methods: Mapping[str, MergeMethod]


def make_card(model: Converted, options: PublishOptions) -> tuple["ModelCard", list[str]]:
    """The card, and warnings for the publisher.

    Raises:
        PublishError: the folder has a README.md that must not be replaced.
        ReportError: a file of results can't be read.
    """
    from huggingface_hub import ModelCard

    readme = read_readme(model.folder)
    if not options.overwrite_card:
        check_replaceable(model, readme)
    stated = stated_by_source(model, readme)
    chosen = find_license(stated, options.license)
    warnings = reminders(chosen, options.name)
    if not chosen.inherited and "license" in stated:
        warnings.append(f"--license {chosen.id} replaces {stated['license']}, which the source's README.md states")
    base = model.base_model
    if options.base_model not in (None, base[0]):
        base = options.base_model, None
    if base[0] is None:
        warnings.append("it is not known whether the source is on the Hub: if it is, give --base-model")
    measured = read_measured([local_path(path) for path in options.results], model, options.repo_id)
    context = CardContext(options, model, base, chosen, stated, measured, METHODS)
    front = f"---\n{_metadata(context).to_yaml(line_break=chr(10))}\n---\n"
    card = ModelCard(sign(front, render(_TEMPLATE, context), stated), ignore_metadata_errors=True)
    return card, [*warnings, *measured.warnings]


def _metadata(context: CardContext) -> "ModelCardData":
    """The front matter, which the Hub reads."""
    from huggingface_hub import ModelCardData

    model, base_id = context.model, context.base[0]
    tags = ["gqa-convert", "multi-query-attention" if model.record.groups == 1 else "grouped-query-attention"]
    if model.trainings:
        tags.append("uptrained")
    task = _TASKS.get(model.auto_class)
    results = _eval_results(context.measured, task or "text-generation")
    return ModelCardData(
        base_model=base_id,
        base_model_relation="finetune" if base_id else None,
        library_name="transformers",
        pipeline_tag=task,
        language=context.stated.get("language"),
        license=context.license.id,
        license_name=context.license.name,
        license_link=context.license.link,
        datasets=_datasets(context) or None,
        tags=tags,
        model_name=context.options.name if results else None,
        eval_results=results or None,
    )


def _datasets(context: CardContext) -> list[str]:
    """Those of recipes."""
    found = []
    for training in context.model.trainings:
        found += [text["source"] for text in training.recipe.get("data", []) if is_hub_dataset(text)]
    return list(dict.fromkeys(found))


def is_hub_dataset(text: Mapping[str, Any]) -> bool:
    """Whether a source of text has a configuration, a commit or a split, which only datasets on the Hub have."""
    stated = text.get("name") or text.get("revision") or text.get("split") not in (None, "train")
    return bool(stated and HUB_ID.fullmatch(text["source"]))


def _eval_results(measured: Measured, task: str) -> list["EvalResult"]:
    """The entries of the `model-index`."""
    from huggingface_hub import EvalResult

    figures = []
    for words, scored in measured.scored.items():
        text, name = scored.file.data, one_line(words)
        assert text is not None
        # the client joins entries of one type and configuration under the name of the first
        dataset: dict[str, Any] = {"dataset_name": name, "dataset_type": "text", "dataset_config": name}
        if is_hub_dataset(text.model_dump()):
            dataset = {"dataset_name": name, "dataset_type": text.source, "dataset_config": text.name}
            dataset |= {"dataset_split": text.split, "dataset_revision": text.revision}
        for metric, label in _METRICS.items():
            value = getattr(scored.ours, metric)
            if value is not None:
                figures.append(EvalResult(task, metric_type=metric, metric_name=label, metric_value=value, **dataset))
    for file in measured.tasks:
        for name, metric, value, _ in file.rows():
            kind = metric.split(",")[0]
            figures.append(EvalResult(task, name, name, kind, value, metric_name=metric))
    return figures
