"""The check on gqa_conversion.json: what OUT claims about its conversion, against configs and tensors."""

from typing import Any

from gqa_convert.verify.config import same_json
from gqa_convert.verify.files import file_sha256
from gqa_convert.verify.geometry import Kind
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FACTORED, FITTED, Result, read_claims
from gqa_convert.verify.weights import CONFIG, PROVENANCE


def check_provenance(result: Result, errors: dict[str, float] | None) -> str:
    """Compare the claims with configs and tensors.

    Args:
        result: OUT.
        errors: the recomputed merge errors; None if other checks judge them or the tensors did not pass.
    """
    claims, geometry, inputs = read_claims(result.inputs.out), result.geometry, result.inputs
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion, which changed its tensors: "
            "verify the checkpoint that it was trained from"
        )
    route = "native" if inputs.has_class else "checkpoint's own code"
    method = result.shown_method()
    truth = {
        "model_type": inputs.family.model_type,
        "heads": geometry.heads,
        "source_kv_heads": geometry.before,
        "groups": geometry.groups,
        "method": method,
        "encoder": result.encoder,
        "route": "own file" if result.modeling else route,
        "kv_bytes_per_token": _cache_bytes(result, "decoder"),
        "cross_kv_bytes_per_encoder_token": _cache_bytes(result, "cross"),
    }
    for key, value in truth.items():
        if not same_json(claims.get(key), value):
            raise Failure(f"{PROVENANCE} claims {key} = {claims.get(key)!r}, expected {value!r}")
    text = claims.get("calibration")
    named = isinstance(text, dict) and type(text.get("tokens")) is int and text["tokens"] > 0
    if not (named if method == FITTED else text is None or (named and method == FACTORED)):
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {method}")
    _check_source(claims.get("source"), inputs)
    if errors is not None:
        _check_errors(claims.get("merge_error"), errors)
    return f"{method}, {geometry.change()} K/V heads"


def _check_source(origin: Any, inputs: Inputs) -> None:
    """The recorded type, sizes and hashes are those of SOURCE as the user named it."""
    source, model_type = inputs.original, inputs.original_config.get("model_type")
    if not isinstance(origin, dict) or not isinstance(origin.get("files"), dict):
        raise Failure(f"{PROVENANCE} does not list the files of its source")
    files = origin["files"]
    if origin.get("model_type") != model_type:
        raise Failure(f"{PROVENANCE} claims a {origin.get('model_type')} as its source, which is a {model_type}")
    for name in (CONFIG, *source.files):
        stated = files.get(name) if isinstance(files.get(name), dict) else {}
        size = (source.folder / name).stat().st_size
        if name != CONFIG and stated.get("bytes") != size:
            raise Failure(f"{PROVENANCE} claims {stated!r} for {name}, which has {size} bytes in this SOURCE")
        recorded = stated.get("sha256")
        if recorded is not None and recorded != file_sha256(source.folder / name):
            raise Failure(f"{PROVENANCE} claims SHA-256 {recorded} for {name}, which has another hash in this SOURCE")


def _check_errors(claimed: Any, errors: dict[str, float]) -> None:
    if not isinstance(claimed, dict) or set(claimed) != set(errors):
        raise Failure(f"{PROVENANCE} must have a merge_error for each of the {len(errors)} merged tensors and no other")
    for name, found in errors.items():
        stated = claimed[name]
        if not isinstance(stated, float | int) or not abs(stated - found) <= 0.01 * found + 1e-6:
            raise Failure(f"{PROVENANCE} claims a merge error of {stated!r} for {name}, the tensors show {found:.6f}")


def _cache_bytes(result: Result, kind: Kind) -> dict[str, int] | None:
    """Bytes of keys and values per token over all modules of one kind, in SOURCE and in OUT; None if there are none."""
    before = after = 0
    for module in result.geometry.modules:
        for tensor in module.tensors:
            name = tensor.names[0]
            if module.kind == kind and name.endswith(".weight"):
                widths = [rows.shape[1] for role, rows in tensor.before.items() if role in ("key", "value")]
                nbytes = sum(widths) * result.inputs.source.result_dtype(name).itemsize
                before += module.before * nbytes
                after += module.after * nbytes
    return {"before": before, "after": after} if before else None
