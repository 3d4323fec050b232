"""The model card: its metadata, and the text that `card.md.jinja` makes."""

import json
from pathlib import Path

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.signed_card import CARD, is_our_card, signed
from gqa_convert.errors import OptionError, PublishError
from gqa_convert.hub.converted import Converted
from gqa_convert.hub.licenses import find_license, reminders
from gqa_convert.hub.markup import render
from gqa_convert.hub.measured import eval_results, read_measured
from gqa_convert.hub.options import PublishOptions
from gqa_convert.hub.readme import came_with_source, read_readme, stated_by_source
from gqa_convert.merging.methods import METHODS

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
}


def make_card(model: Converted, options: PublishOptions) -> tuple[str, list[str]]:
    """The text of the card, and warnings for the publisher. A README.md that the user wrote or edited is the card.

    Raises:
        OptionError: an option would change such a file.
        PublishError: the README.md is no text, or the record lacks something.
        ReportError: a file of results can't be read.
    """
    from huggingface_hub import ModelCardData
    from jinja2 import UndefinedError

    readme = read_readme(model.folder)
    if readme is not None and not is_our_card(readme) and not came_with_source(model, readme):
        _refuse_changes(model.folder / CARD, options)
        return readme, [f"{CARD} was written or edited by you and stays as it is; move it away for a new card"]
    stated = stated_by_source(model, readme or "")
    chosen = find_license(stated, options.license)
    warnings = reminders(chosen, options.name)
    if not chosen.inherited and "license" in stated:
        warnings.append(f"--license {chosen.id} replaces {stated['license']}, which the source's README.md states")
    base_id, revision = model.base_model
    if options.base_model not in (None, base_id):
        base_id, revision = options.base_model, None
    if base_id is None:
        warnings.append("it is not known whether the source is on the Hub: if it is, give --base-model")
    measured, left_out = read_measured(options.results, model)
    tags = ["gqa-convert", "multi-query-attention" if model.record.groups == 1 else "grouped-query-attention"]
    if model.trainings:
        tags.append("uptrained")
    task = _TASKS.get(model.auto_class)
    results = eval_results(measured, task or "text2text-generation")
    front = ModelCardData(
        base_model=base_id,
        base_model_relation="finetune" if base_id else None,
        library_name="transformers",
        pipeline_tag=task,
        language=stated.get("language"),
        license=chosen.id,
        license_name=chosen.name,
        license_link=chosen.link,
        model_name=options.name if results else None,
        eval_results=results or None,
        tags=tags,
    ).to_yaml(line_break="\n")
    context = {
        "options": options,
        "model": model,
        "base": (base_id, revision),
        "license": chosen,
        "measured": measured,
        "methods": METHODS,
    }
    # what the source states is kept in a comment, since the card replaces the only file that says it
    kept = json.dumps(stated).replace("<", r"\u003c").replace(">", r"\u003e")
    try:
        body = render(_TEMPLATE, context)
    except UndefinedError as problem:
        raise PublishError(f"{PROVENANCE} lacks what a card states ({problem}): convert again") from None
    return signed(f"---\n{front}\n---\n", kept, body), [*warnings, *left_out]


def _refuse_changes(card: Path, options: PublishOptions) -> None:
    stated = {"--results": options.results, "--base-model": options.base_model, "--license": options.license}
    unread = [name for name, value in stated.items() if value]
    if unread:
        raise OptionError(
            f"{card} was written or edited by you and stays as it is, so {unread[0]} would change nothing: "
            f"leave it out, or move the file away for a new card"
        )
