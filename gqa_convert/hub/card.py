"""The model card: its metadata, and the text that `card.md.jinja` makes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint.signed_card import CARD
from gqa_convert.errors import PublishError
from gqa_convert.hub.converted import Converted
from gqa_convert.hub.licenses import find_license, reminders
from gqa_convert.hub.markup import one_line, render
from gqa_convert.hub.measured import Measured, read_measured
from gqa_convert.hub.options import HUB_ID, PublishOptions
from gqa_convert.hub.readme import is_users, read_readme, sign, stated_by_source
from gqa_convert.merging.methods import METHODS

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

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


def make_card(model: Converted, options: PublishOptions) -> tuple[str, list[str]]:
    """The text of the card, and warnings for the publisher.

    Raises:
        PublishError: the folder has a README.md that must not be replaced.
        ReportError: a file of results can't be read.
    """
    from huggingface_hub import ModelCardData

    readme = read_readme(model.folder)
    if readme is not None and is_users(model, readme) and not options.overwrite_card:
        raise PublishError(
            f"{model.folder / CARD} was written or edited by you: move it away, or rename it with --overwrite-card"
        )
    stated = stated_by_source(model, readme)
    chosen = find_license(stated, options.license)
    warnings = reminders(chosen, options.name)
    if not chosen.inherited and "license" in stated:
        warnings.append(f"--license {chosen.id} replaces {stated['license']}, which the source's README.md states")
    base_id, revision = model.base_model
    if options.base_model not in (None, base_id):
        base_id, revision = options.base_model, None
    if base_id is None:
        warnings.append("it is not known whether the source is on the Hub: if it is, give --base-model")
    measured = read_measured(options.results, model, options.repo_id)
    tags = ["gqa-convert", "multi-query-attention" if model.record.groups == 1 else "grouped-query-attention"]
    if model.trainings:
        tags.append("uptrained")
    texts = [text for training in model.trainings for text in training.recipe.get("data", [])]
    task = _TASKS.get(model.auto_class)
    results = _eval_results(measured, task or "text-generation")
    front = ModelCardData(
        base_model=base_id,
        base_model_relation="finetune" if base_id else None,
        library_name="transformers",
        pipeline_tag=task,
        language=stated.get("language"),
        license=chosen.id,
        license_name=chosen.name,
        license_link=chosen.link,
        datasets=list(dict.fromkeys(text["source"] for text in texts if is_hub_dataset(text))) or None,
        tags=tags,
        model_name=options.name if results else None,
        eval_results=results or None,
    ).to_yaml(line_break="\n")
    context = {
        "options": options,
        "model": model,
        "base": (base_id, revision),
        "license": chosen,
        "measured": measured,
        "methods": METHODS,
    }
    text = sign(f"---\n{front}\n---\n", render(_TEMPLATE, context), stated)
    return text, [*warnings, *measured.warnings]


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
        for each in file.figures():
            kind = each.metric.split(",")[0]
            figures.append(EvalResult(task, each.task, each.task, kind, each.value, metric_name=each.metric))
    return figures
