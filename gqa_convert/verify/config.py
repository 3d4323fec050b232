"""The checks on OUT's config and on the modelling files that it leads to."""

import copy
import json
from pathlib import Path
from typing import Any

from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.layerwise import restate, restate_by_kind
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.wrappers import SECTION, decoder_config
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import CONFIG, read_object


def same_json(a: Any, b: Any) -> bool:
    """Whether two values are the same in JSON, where 1, 1.0 and true differ."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def check_config(inputs: Inputs, geometry: Geometry, modeling: Modeling | None, *, encoder: bool) -> str:
    """OUT's config is SOURCE's, except for the number of K/V heads, which is that of the tensors, and for the keys that
    lead to a modelling file.

    Args:
        inputs: both checkpoints.
        geometry: of both.
        modeling: the modelling file that OUT must come with.
        encoder: whether an encoder was converted.
    """
    found = read_object(inputs.out / CONFIG)
    original, family = inputs.config, inputs.family
    if family.wrapped:
        expected = _composite_config(original, family, geometry.counts[0])
    elif family.reads_per_layer_config and len(set(geometry.counts)) > 1:
        expected = restate_by_kind(original, geometry.counts) | legacy_config_keys(original)
    elif modeling in family.layerwise and modeling is not None:
        expected = restate(modeling, original, tuple(geometry.counts)) | modelling_keys(modeling, original)
    else:
        expected = _config_of_one_number(original, family, modeling, geometry.counts[0], encoder)
    for key in sorted(found.keys() | expected.keys()):
        if key not in found:
            raise Failure(f"{CONFIG} lacks {key}, expected {expected[key]!r}")
        if key not in expected:
            raise Failure(f"{CONFIG} has {key} = {found[key]!r}, which SOURCE does not have")
        if not same_json(found[key], expected[key]):
            raise Failure(f"{CONFIG} has {key} = {found[key]!r}, expected {expected[key]!r}")
    changed = [key for key in expected if not same_json(expected[key], original.get(key))]
    return f"SOURCE's, except for {', '.join(changed)} ({geometry.groups} K/V heads)"


def _config_of_one_number(
    original: dict[str, Any], family: Family, modeling: Modeling | None, groups: int, encoder: bool
) -> dict[str, Any]:
    expected = copy.deepcopy(original)
    if family.modeling is None or modeling is not None:  # stock classes of the other types do not know these keys
        for dotted in family.kv_heads_keys:
            *parents, last = dotted.split(".")
            section = expected
            for key in parents:
                section = section.setdefault(key, {})
            section[last] = groups
        if encoder:
            expected[family.encoder_kv_heads_key] = groups
        if family.one_kv_head_key:
            expected[family.one_kv_head_key] = groups == 1
    expected |= {"multi_query_attention": True, "multi_query_group_num": groups}
    if modeling is None:
        return expected | legacy_config_keys(original)
    return expected | modelling_keys(modeling, original)


def _composite_config(original: dict[str, Any], family: Family, groups: int) -> dict[str, Any]:
    """The config of a model around a decoder: the numbers stand in its decoder's config, and beside it only where SOURCE
    repeats them.
    """
    changes = dict.fromkeys(family.kv_heads_keys, groups) | {
        "multi_query_attention": True,
        "multi_query_group_num": groups,
    }
    legacy = legacy_config_keys(decoder_config(original))
    expected = copy.deepcopy(original)
    if not isinstance(original.get(SECTION), dict):
        return legacy | expected | changes
    expected[SECTION] = legacy | expected[SECTION] | changes
    repeated = {key: groups for key in family.kv_heads_keys if key in expected}
    return expected | repeated | legacy_config_keys(original)


def modelling_keys(modeling: Modeling, original: dict[str, Any]) -> dict[str, Any]:
    """The config entries that lead transformers to a modelling file.

    SOURCE's `auto_map` keeps its entries for other classes than configs and models.
    """
    classes = [name for _, name in modeling.classes]
    stated = original.get("architectures")
    wanted = [f"GQA{name.removeprefix('GQA')}" for name in stated] if isinstance(stated, list) else []
    models = [name for auto, name in modeling.classes if auto not in ("AutoConfig", "AutoModel")]
    kept = original.get("auto_map")
    others = {auto: code for auto, code in kept.items() if not _is_model(auto)} if isinstance(kept, dict) else {}
    # without a tokenizer class, transformers would look for one of the new model type
    tokenizer = original.get("tokenizer_class")
    return {
        "model_type": modeling.model_type,
        "architectures": [name for name in wanted if name in classes] or models[:1],
        "auto_map": others | modeling.auto_map,
        "tokenizer_class": modeling.tokenizer if tokenizer is None else tokenizer,
    }


def _is_model(auto: str) -> bool:
    return auto.startswith(("AutoConfig", "AutoModel"))


def check_modelling_file(out: Path, config: dict[str, Any], modeling: Modeling) -> str:
    """OUT's modelling files are the package's, byte for byte, and the only code that its config leads to."""
    for file in modeling.files:
        if not (out / file.name).is_file():
            raise Failure(f"{file.name} is missing, and transformers cannot load OUT without it")
        found, own = (out / file.name).read_bytes(), file.read_bytes()
        if found != own:
            same = [a == b for a, b in zip(found, own, strict=False)]
            at = same.index(False) if False in same else len(same)
            raise Failure(
                f"{file.name} differs from the package's own file from byte {at} on: its code is not executed"
            )
    stated = config.get("auto_map")
    leads = {auto: code for auto, code in stated.items() if _is_model(auto)} if isinstance(stated, dict) else {}
    for auto in {**leads, **modeling.auto_map}:
        if leads.get(auto) != modeling.auto_map.get(auto):
            raise Failure(f"{CONFIG} maps {auto} to {leads.get(auto)}, expected {modeling.auto_map.get(auto)}")
    return f"{' and '.join(file.name for file in modeling.files)}, the package's own files"
