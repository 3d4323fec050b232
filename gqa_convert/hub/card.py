"""The model card: its metadata, the text that `card.md.jinja` makes, and the OUT/README.md that it
replaces.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.errors import OptionError, PublishError, printable
from gqa_convert.merging.methods import METHODS
from gqa_convert.publishing.ownership import CARD, MARKER, is_our_card, signed
from gqa_convert.runtime.json_objects import JsonObject

from .converted import Converted, without_folders
from .markup import render
from .measured import read_measured
from .repository import LICENSE_ID, PublishOptions

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
}
_LICENSE = ("license", "license_name", "license_link")
_INHERITED = (*_LICENSE, "language")
"""Keys of the source's front matter that hold for the result too."""
_BUILT_WITH = {
    "llama3": "Built with Meta Llama 3",
    "llama3.1": "Built with Llama",
    "llama3.2": "Built with Llama",
    "llama3.3": "Built with Llama",
    "llama4": "Built with Llama",
}
"""Words that a card must show, by the licence's identifier (section 1.b.i of each)."""


def make_card(model: Converted, options: PublishOptions) -> tuple[str, list[str]]:
    """The text of the card, and warnings for the publisher. A README.md that the user wrote or
    edited is the card.

    Raises:
        OptionError: an option would change such a file.
        PublishError: the README.md is no text, or the record lacks something.
        ReportError: a file of results can't be read.
    """
    from huggingface_hub import ModelCardData
    from jinja2 import UndefinedError

    # a README of the user's is the card
    readme = _read_readme(model)
    if readme is not None and not _may_be_replaced(model, readme):
        _refuse_useless_options(model, options)
        kept = (
            f"{CARD} was written or edited by you and stays as it is; move it away for a new card"
        )
        return readme, [kept]
    # licence
    stated = _stated_by_source(readme or "")
    of_source = stated.get("license")
    terms = _terms(stated, options.license)
    is_inherited = terms.get("license") == str(of_source).lower()
    warnings = []
    if not terms:
        warnings.append(
            "no licence is known: without one the model may not be used, and the source's terms "
            "may forbid publishing it; find them, and give --license"
        )
    elif of_source and not is_inherited:
        warnings.append(
            f"--license {terms['license']} replaces {of_source}, "
            "which the source's README.md states"
        )
    # the model that it was made from: what the user says, or the record
    base_id, revision = model.base_model
    if options.base_model not in (None, base_id):
        base_id, revision = options.base_model, None
    if base_id is None:
        warnings.append(
            "it is not known whether the source is on the Hub: if it is, give --base-model"
        )
    # the front matter, which the Hub reads
    measured, left_out = read_measured(options.results, model)
    kind = "multi-query-attention" if model.record["kv_heads"] == 1 else "grouped-query-attention"
    tags = ["gqa-convert", kind, *(["uptrained"] if model.trainings else [])]
    front = ModelCardData(
        base_model=base_id,
        base_model_relation="finetune" if base_id else None,
        library_name="transformers",
        pipeline_tag=_TASKS.get(model.auto_class),
        language=stated.get("language"),
        tags=tags,
        **terms,
    ).to_yaml(line_break="\n")
    # the text, which people read
    context = {
        "options": options,
        "model": model,
        "base": (base_id, revision),
        "terms": terms,
        "is_inherited": is_inherited,
        "notice": _BUILT_WITH.get(terms.get("license", "")),
        "measured": measured,
        "methods": METHODS,
    }
    try:
        body = render(_TEMPLATE, context)
    except UndefinedError as problem:
        raise PublishError(
            f"{PROVENANCE} lacks what a card states ({problem}): convert again"
        ) from None
    # what the source states is kept in a comment, since the card replaces the only file that says
    # it
    kept = json.dumps(stated).replace("<", r"\u003c").replace(">", r"\u003e")
    return signed(f"---\n{front}\n---\n", kept, body), [*warnings, *left_out]


def _read_readme(model: Converted) -> str | None:
    """The text of OUT/README.md, None if there is none.

    Raises:
        PublishError: the file is no text.
    """
    path = model.folder / CARD
    try:
        return path.read_bytes().decode("utf-8") if path.is_symlink() or path.exists() else None
    except (OSError, ValueError) as problem:
        raise PublishError(f"{path} can't be read as text ({problem}): move it away") from None


def _may_be_replaced(model: Converted, readme: str) -> bool:
    """Whether a README.md is a card of this program, or came with the source."""
    digest = hashlib.sha256(readme.encode()).hexdigest()
    return is_our_card(readme) or model.record["written"].get(CARD, {}).get("sha256") == digest


def _refuse_useless_options(model: Converted, options: PublishOptions) -> None:
    """Raise OptionError for an option that would change a README.md of the user."""
    asked = {
        "--results": options.results,
        "--base-model": options.base_model,
        "--license": options.license,
    }
    for name, value in asked.items():
        if value:
            raise OptionError(
                f"{model.folder / CARD} was written or edited by you and stays as it is, "
                f"so {name} would change nothing: "
                "leave it out, or move the file away for a new card"
            )


def _stated_by_source(text: str) -> JsonObject:
    """Licence and languages that the source states, in its README or in the comment of the card
    that replaced it; nothing if there is neither.
    """
    match = MARKER.search(text)
    found = json.loads(match[1]) if match else _front_matter(text)
    stated: JsonObject = {}
    for key in _INHERITED if isinstance(found, dict) else ():
        value = found.get(key)
        if value and isinstance(value, str):
            stated[key] = printable(without_folders(value.strip()))
        elif value and isinstance(value, list):
            stated[key] = [printable(word) for word in value if isinstance(word, str)]
    return stated


def _terms(stated: JsonObject, given: str | None) -> JsonObject:
    """The front matter about the licence that the user gives, or else about that of the source;
    nothing if that is unknown or several.

    Args:
        stated: by the source.
        given: by the user.
    """
    known = str(stated.get("license")).lower()
    if given is not None and given.lower() != known:
        return {"license": given.lower()}
    if "license" not in stated or not LICENSE_ID.fullmatch(known):
        return {}
    return {key: stated[key] for key in _LICENSE if key in stated} | {"license": known}


def _front_matter(text: str) -> Any:
    """The front matter of a README, in which every value is a word: `no` is Norwegian, not false.
    None if it can't be read.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        block = REGEX_YAML_BLOCK.search(text)
        return block and yaml.load(block[2], yaml.BaseLoader)
    except yaml.YAMLError:
        return None
