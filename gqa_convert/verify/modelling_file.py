"""The modelling file that OUT may come with: whether it needs one, the config keys that lead to it, and its bytes."""

from pathlib import Path
from typing import Any

from gqa_convert.families.family import Family, Modeling
from gqa_convert.verify.checkpoint_reader import CONFIG
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.report import Failure, Finding


def modelling_file(family: Family, geometry: Geometry) -> Modeling | None:
    """The modelling file that OUT must come with, if any."""
    if geometry.form:
        return geometry.form
    return family.modeling if geometry.route(family) == "own file" else None


def modelling_keys(modeling: Modeling, original: dict[str, Any]) -> dict[str, Any]:
    """The config entries that lead transformers to a modelling file.

    SOURCE's `auto_map` keeps its entries for other classes than configs and models.
    """
    classes = [name for _, name in modeling.classes]
    stated = original.get("architectures")
    wanted = [name if name.startswith("GQA") else f"GQA{name}" for name in stated] if isinstance(stated, list) else []
    kept = original.get("auto_map")
    others = {} if not isinstance(kept, dict) else {auto: code for auto, code in kept.items() if not _is_model(auto)}
    # without a tokenizer class, transformers would look for one of the new model type
    tokenizer = {} if original.get("tokenizer_class") is not None else {"tokenizer_class": modeling.tokenizer}
    return {
        "model_type": modeling.model_type,
        "architectures": [name for name in wanted if name in classes] or [_language_model(modeling)],
        "auto_map": others | modeling.auto_map,
        **tokenizer,
    }


def _is_model(auto: str) -> bool:
    return auto.startswith(("AutoConfig", "AutoModel"))


def _language_model(modeling: Modeling) -> str:
    """The first class that is neither the config nor the bare model."""
    return next(name for auto, name in modeling.classes if auto not in ("AutoConfig", "AutoModel"))


def check_modelling_file(out: Path, config: dict[str, Any], modeling: Modeling) -> Finding:
    """OUT's modelling file and the file that it imports are the package's, byte for byte, and the only code that its
    config leads to.
    """
    for file in modeling.files:
        if not (out / file.name).is_file():
            raise Failure(f"{file.name} is missing, and transformers cannot load OUT without it")
        found, own = (out / file.name).read_bytes(), file.read_bytes()
        if found != own:
            pairs = enumerate(zip(found, own, strict=False))
            at = next((at for at, (theirs, ours) in pairs if theirs != ours), min(len(found), len(own)))
            raise Failure(
                f"{file.name} differs from the package's own file from byte {at} on: its code is not executed"
            )
    stated = config.get("auto_map")
    leads = {auto: code for auto, code in stated.items() if _is_model(auto)} if isinstance(stated, dict) else {}
    if leads != modeling.auto_map:
        wrong = next(auto for auto in modeling.auto_map | leads if leads.get(auto) != modeling.auto_map.get(auto))
        raise Failure(f"{CONFIG} maps {wrong} to {leads.get(wrong)}, expected {modeling.auto_map.get(wrong)}")
    names = " and ".join(file.name for file in modeling.files)
    size = sum(file.stat().st_size for file in modeling.files)
    return Finding(f"{names}, {size:,} bytes, the package's own files", {"bytes": size})
