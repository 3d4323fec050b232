"""The checks on what OUT states: its config and its record, gqa_conversion.json."""

import copy
import json

from gqa_convert.families.composite import decoder_section
from gqa_convert.families.family import TESTED, TESTED_KEY, Modeling
from gqa_convert.families.layerwise import restate
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.publishing.ownership import hash_file

from .inputs import CONFIG, PROVENANCE, JsonObject
from .report import Failure
from .result import FITTED, Result


def compare_json(where: str, found: JsonObject, expected: JsonObject) -> None:
    """Compare two JSON objects key by key, where 1, 1.0 and true differ.

    Raises:
        Failure: they differ.
    """
    for key in sorted(found.keys() | expected.keys()):
        stated, wanted = _in_json(found, key), _in_json(expected, key)
        if stated != wanted:
            raise Failure(f"{where}: {key} is {stated[:500]}, expected {wanted[:500]}")


def _in_json(stated: JsonObject, key: str) -> str:
    return json.dumps(stated[key], sort_keys=True) if key in stated else "nothing"


def check_config(result: Result) -> str:
    """OUT's config is SOURCE's, except for the number of K/V heads, which is that of the tensors,
    and for the keys that lead to a modelling file and say what that was tested with.
    """
    compare_json(CONFIG, result.inputs.out_config, _expected_config(result))
    return f"SOURCE's, with {result.kv_heads} K/V heads"


def _expected_config(result: Result) -> JsonObject:
    inputs = result.inputs
    family = inputs.family
    modeling = result.modeling
    original = inputs.converted.config
    kv_heads = result.kv_heads
    added = legacy_config_keys(original)
    if modeling:
        tested = inputs.out_config.get(TESTED_KEY, TESTED)  # another version's, too
        added = _modelling_keys(modeling, original) | {TESTED_KEY: tested}
    if modeling and modeling in family.layerwise:
        return restate(modeling, original, tuple(result.counts)) | added

    # the numbers; the stock class of another type does not know the family's keys
    changes = {"multi_query_attention": True, "multi_query_group_num": kv_heads}
    if modeling or not family.modeling:
        changes |= dict.fromkeys(family.kv_heads_keys, kv_heads)
        if family.one_kv_head_key:
            changes[family.one_kv_head_key] = kv_heads == 1

    # of a composite model they stand in the decoder's config, and beside it only where SOURCE's do
    expected = section = copy.deepcopy(original)
    if family.is_composite:
        if key := decoder_section(original):
            section = expected[key]
            expected |= {key: kv_heads for key in family.kv_heads_keys if key in expected}
        for key, value in legacy_config_keys(inputs.decoder_config).items():
            section.setdefault(key, value)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = section
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return expected | added


def _modelling_keys(modeling: Modeling, original: JsonObject) -> JsonObject:
    """The config entries that lead transformers to a modelling file.

    SOURCE's `auto_map` keeps its entries for other classes than configs and models.
    """
    classes = modeling.classes
    models = [name for auto, name in classes.items() if auto not in ("AutoConfig", "AutoModel")]
    wanted = [f"GQA{name.removeprefix('GQA')}" for name in original.get("architectures") or []]
    others = {
        auto: code
        for auto, code in (original.get("auto_map") or {}).items()
        if not auto.startswith(("AutoConfig", "AutoModel"))
    }
    return {
        "model_type": modeling.model_type,
        "architectures": [name for name in wanted if name in classes.values()] or models[:1],
        "auto_map": others | modeling.auto_map,
        # without one, transformers would look for a tokenizer of the new model type
        "tokenizer_class": original.get("tokenizer_class") or modeling.tokenizer,
    }


def check_provenance(result: Result) -> str:
    """The type, the heads and the method that OUT claims are those that the files show, and the
    type, the sizes and the hashes that it claims of SOURCE are those of the checkpoint that the
    user named.
    """
    inputs = result.inputs
    claims = inputs.claims
    if not claims:
        raise Failure(f"{PROVENANCE} is missing, or no JSON object")
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion, which "
            "changed its tensors: verify the checkpoint that it was trained from"
        )

    # what the files show
    route = "native" if inputs.has_class else "checkpoint's own code"
    truth = {
        "model_type": inputs.family.model_type,
        "heads": result.decoder[0].heads,
        "source_kv_heads": max(module.before for module in result.decoder),
        "kv_heads": result.kv_heads,
        "method": result.method,
        "route": "own file" if result.modeling else route,
        "source": inputs.named.config.get("model_type"),
    }
    source = claims["source"]
    stated = claims | {"source": source["model_type"]}
    compare_json(PROVENANCE, {key: stated.get(key) for key in truth}, truth)

    # `fit` needs a text, `factor` may have one, and no other method reads any
    text = claims.get("calibration")
    is_right = result.method != FITTED if text is None else result.folds and text["tokens"] > 0
    if not is_right:
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {result.method}")

    # the files of SOURCE
    for name in (CONFIG, *inputs.original.files):
        path = inputs.original.folder / name
        # the bytes alone of large files that nobody asked to hash
        is_hashed = "sha256" in source["files"][name]
        found = hash_file(path) if is_hashed else {"bytes": path.stat().st_size}
        compare_json(f"{PROVENANCE}: SOURCE's {name}", source["files"][name], found)
    return f"as the files show, method {result.method}"
