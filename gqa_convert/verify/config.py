"""The checks on what leads software to OUT's model: its config, and the modelling file that it may bring along."""

import copy
import json
from pathlib import Path
from typing import Any

from gqa_convert.families.family import Family, LegacyConfigKeys, Modeling
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.report import Failure

CONFIG = "config.json"
CONVENTION = ("multi_query_attention", "multi_query_group_num")

MODELING = Path(__file__).resolve().parents[1] / "families" / "modeling"
"""The package's own modelling files."""


def same_json(a: Any, b: Any) -> bool:
    """Whether two values are one in JSON, in which 1, 1.0 and true differ."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def modelling_file(family: Family, geometry: Geometry) -> Modeling | None:
    """What OUT must bring along."""
    return family.modeling if geometry.route(family) == "own file" else None


def check_config(
    config: dict[str, Any], original: dict[str, Any], family: Family, geometry: Geometry, encoder: bool
) -> str:
    """OUT's config is SOURCE's but for the count of K/V heads, which is that of the tensors, and for what leads to a
    modelling file.

    Args:
        config: OUT's.
        original: SOURCE's.
        family: of SOURCE.
        geometry: of both.
        encoder: whether an encoder was converted.
    """
    groups = geometry.after
    modeling = modelling_file(family, geometry)
    changes: dict[str, Any] = {}
    if family.modeling is None or modeling is not None:  # stock classes of the other types have no such keys
        changes |= dict.fromkeys(family.kv_heads_keys, groups)
        changes |= {family.encoder_kv_heads_key: groups} if encoder else {}
    changes |= dict(zip(CONVENTION, (True, groups), strict=True))
    if modeling is not None:
        changes |= _leads_to(modeling, original)
    expected = copy.deepcopy(original)
    if modeling is None:
        expected |= _legacy_keys(original, family.legacy)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = expected
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    for key in sorted(set(config) | set(expected)):
        if key not in config:
            raise Failure(f"{CONFIG} lacks {key}, which should be {expected[key]!r}")
        if key not in expected:
            raise Failure(f"{CONFIG} has {key} = {config[key]!r}, which SOURCE has not")
        if not same_json(config[key], expected[key]):
            raise Failure(f"{CONFIG} has {key} = {config[key]!r} where {expected[key]!r} belongs")
    return f"SOURCE's but for {', '.join(changes)} ({groups} groups)"


def _legacy_keys(original: dict[str, Any], legacy: LegacyConfigKeys) -> dict[str, Any]:
    """What transformers 4 looks for elsewhere in the config: the dtype, rotary positions and renamed counts.

    The facts of the type are the family's; the rules are written here a second time, so that the converter's are
    checked.
    """
    nested = original.get("rope_parameters")
    nested = nested if isinstance(nested, dict) else {}
    renamed = {"torch_dtype": original.get("dtype")}
    renamed |= {old: original.get(new) for new, old in legacy.renamed}
    sliding, full = nested.get("sliding_attention"), nested.get("full_attention")
    if isinstance(sliding, dict) and legacy.local_rotary_base is not None:
        renamed[legacy.local_rotary_base] = sliding.get("rope_theta")
        nested = full or {}
    elif (
        legacy.one_rotary_base
        and isinstance(full, dict)
        and sliding == {"rope_theta": full.get("rope_theta"), "rope_type": "default"}
    ):
        nested = full
    if {type(value) for value in nested.values()} & {dict}:  # by kind of layer, which had no words in common before
        nested = {}
    renamed |= {legacy.rotary_base: nested.get("rope_theta"), legacy.rotary_share: nested.get("partial_rotary_factor")}
    scaling = {key: nested[key] for key in nested if key not in ("rope_theta", "partial_rotary_factor")}
    scaled = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaled != "default" and legacy.scaled_share in (None, nested.get("partial_rotary_factor")):
        renamed["rope_scaling"] = _legacy_scaling(original, scaling, scaled, legacy)
    if scaled == "longrope":  # which was looked for beside it
        renamed["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    absent = {key: value for key, value in renamed.items() if value is not None and original.get(key) is None}
    if nested and scaled == "default" and legacy.scales_unless_null and original.get("rope_scaling") is None:
        absent["rope_scaling"] = None
    return absent


def _legacy_scaling(
    original: dict[str, Any], scaling: dict[str, Any], scaled: str, legacy: LegacyConfigKeys
) -> dict[str, Any]:
    """`rope_scaling` without the entries that transformers 5 added, where the classes of transformers 4 count them."""
    told = {key for key in scaling if key in original and same_json(original[key], scaling[key])} | {
        "rope_type",
        "type",
    }
    if legacy.rope_scaling_keys and scaling.keys() - told == legacy.rope_scaling_keys:
        return {"type": scaled} | {key: scaling[key] for key in scaling if key not in told}
    return scaling


def _leads_to(modeling: Modeling, original: dict[str, Any]) -> dict[str, Any]:
    """The entries that lead transformers to a modelling file. Of SOURCE's auto_map those stay that lead to no config
    and no model.
    """
    classes = [name for _, name in modeling.classes]
    stated = original.get("architectures")
    wanted = [name if name.startswith("GQA") else f"GQA{name}" for name in stated] if isinstance(stated, list) else []
    kept = original.get("auto_map")
    others = (
        {auto: home for auto, home in kept.items() if not auto.startswith(("AutoConfig", "AutoModel"))}
        if isinstance(kept, dict)
        else {}
    )
    tokenizer = {} if original.get("tokenizer_class") is not None else {"tokenizer_class": modeling.tokenizer}
    return {
        "model_type": modeling.model_type,
        "architectures": [name for name in wanted if name in classes] or [_language_model(modeling)],
        "auto_map": others | modeling.auto_map,
        **tokenizer,  # else a new model type would hide which one it is
    }


def _language_model(modeling: Modeling) -> str:
    """The first class that is neither the config nor the bare model."""
    return next(name for auto, name in modeling.classes if auto not in ("AutoConfig", "AutoModel"))


def check_modelling_file(out: Path, config: dict[str, Any], modeling: Modeling) -> str:
    """OUT's modelling file is the package's own, byte for byte, and all that its config has transformers execute."""
    name = f"{modeling.file}.py"
    path = out / name
    if not path.is_file():
        raise Failure(f"{name} is missing, without which transformers can't load OUT")
    ours, theirs = path.read_bytes(), (MODELING / name).read_bytes()
    if ours != theirs:
        at = next(
            (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise Failure(f"{name} differs from the package's own from byte {at} on: its code is not executed")
    stated = config.get("auto_map")
    leads = (
        {auto: home for auto, home in stated.items() if auto.startswith(("AutoConfig", "AutoModel"))}
        if isinstance(stated, dict)
        else {}
    )
    if leads != modeling.auto_map:
        wrong = next(auto for auto in modeling.auto_map | leads if leads.get(auto) != modeling.auto_map.get(auto))
        raise Failure(f"{CONFIG} leads {wrong} to {leads.get(wrong)} where {modeling.auto_map.get(wrong)} belongs")
    return f"{name}, {len(theirs):,} bytes, the package's own"
