"""The metadata of a card, which the Hub reads."""

from typing import TYPE_CHECKING, Any

from gqa_convert.measuring.results.fields import printable
from gqa_convert.publishing.facts import Facts
from gqa_convert.publishing.licences import Licence
from gqa_convert.publishing.markup import without_folders
from gqa_convert.publishing.measurements import Measured

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


def card_data_of(
    facts: Facts,
    repo_id: str,
    base_model: str | None,
    licence: Licence,
    measured: Measured,
    stated: dict[str, Any],
    datasets: tuple[str, ...],
) -> "ModelCardData":
    """The metadata of a card.

    Args:
        facts: of the checkpoint.
        repo_id: of the Hub repository.
        base_model: id on the Hub, None if it is unknown.
        licence: of the model.
        measured: results for the `model-index`.
        stated: what the source's README states; its languages and its task hold for the result too.
        datasets: ids on the Hub of the training data.
    """
    from huggingface_hub import ModelCardData

    task = pipeline_tag(facts, stated)
    results = eval_results(measured, task or "text-generation")
    return ModelCardData(
        base_model=base_model,
        base_model_relation="finetune" if base_model else None,
        library_name="transformers",
        pipeline_tag=task,
        language=_languages(stated.get("language")),
        license=list(licence.ids) if len(licence.ids) > 1 else licence.ids[0] if licence.ids else None,
        license_name=licence.name,
        license_link=licence.link,
        datasets=list(datasets) or None,
        tags=tags(facts),
        **({"model_name": repo_id.rsplit("/", 1)[-1], "eval_results": results} if results else {}),
    )


def pipeline_tag(facts: Facts, stated: dict[str, Any]) -> str | None:
    """The task that the source states, or else the task of the model's class."""
    tag = stated.get("pipeline_tag")
    if isinstance(tag, str) and tag.replace("-", "").isalnum() and tag.isascii():
        return tag
    if facts.plan.family.wrapped:
        return "image-text-to-text"
    classes = facts.checkpoint.config.get("architectures") or [""]
    return "text-generation" if str(classes[0]).endswith(("ForCausalLM", "LMHeadModel")) else None


def tags(facts: Facts) -> list[str]:
    """The tags by which people filter models."""
    attention = "multi-query-attention" if facts.groups == 1 else "grouped-query-attention"
    return ["gqa-convert", attention, *(["uptrained"] if facts.trainings else [])]


def eval_results(measured: Measured, task: str) -> list[Any]:
    """The entries of the `model-index`: losses and what follows from them for each text."""
    from huggingface_hub import EvalResult

    found = []
    for each in measured.scored:
        metrics = (
            ("loss", "loss, nats per token", each.ours.loss),
            ("perplexity", "perplexity per token", each.ours.perplexity),
            ("bits_per_byte", "bits per byte", each.ours.bits_per_byte),
            ("kl", "KL divergence from the reference, nats per token", each.ours.kl),
        )
        found += [
            EvalResult(
                task_type=task,
                dataset_type="text",
                dataset_name=without_folders(each.evaluation.text),
                metric_type=kind,
                metric_name=name,
                metric_value=float(f"{value:.5g}"),
            )
            for kind, name, value in metrics
            if value is not None
        ]
    return found


def _languages(value: object) -> str | list[str] | None:
    """Language codes that the source states."""
    given = value if isinstance(value, list) else [value]
    codes = [printable(each) for each in given if isinstance(each, str) and 0 < len(each) <= 20]
    return None if not codes else codes if isinstance(value, list) else codes[0]
