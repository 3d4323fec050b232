"""The check on gqa_conversion.json: what OUT claims about its conversion, against configs and tensors."""

from typing import Any

from gqa_convert.verify.config import compare_json
from gqa_convert.verify.files import file_sha256
from gqa_convert.verify.geometry import Kind
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FACTORED, FITTED, Result
from gqa_convert.verify.weights import CONFIG, PROVENANCE


def check_provenance(result: Result, errors: dict[str, float] | None) -> str:
    """Compare the claims with configs and tensors.

    Args:
        result: OUT.
        errors: the recomputed merge errors; None if other checks judge them or the tensors did not pass.
    """
    claims, geometry, inputs = result.claims, result.geometry, result.inputs
    if not claims:
        raise Failure(f"{PROVENANCE} is missing, or no JSON object")
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion, which changed its tensors: "
            "verify the checkpoint that it was trained from"
        )
    route = "native" if inputs.has_class else "checkpoint's own code"
    method = result.shown_method
    truth = {
        "model_type": inputs.family.model_type,
        "heads": geometry.decoder[0].heads,
        "source_kv_heads": max(module.before for module in geometry.decoder),
        "groups": geometry.groups,
        "method": method,
        "encoder": result.encoder,
        "route": "own file" if result.modeling else route,
        "kv_bytes_per_token": _cache_bytes(result, "decoder"),
        "cross_kv_bytes_per_encoder_token": _cache_bytes(result, "cross"),
    }
    compare_json(PROVENANCE, {key: claims.get(key) for key in truth}, truth)
    text = claims.get("calibration")
    has_text = text is not None and text["tokens"] > 0
    if (text is not None) != has_text or (method != FACTORED and has_text != (method == FITTED)):
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {method}")
    _check_source(claims["source"], inputs)
    if errors is not None:
        compare_json(f"{PROVENANCE}: merge_error", dict.fromkeys(claims["merge_error"]), dict.fromkeys(errors))
        for name, error in errors.items():
            check_error(name, claims["merge_error"][name], error, 0.01 * error)
    return f"as the files show, method {method}"


def check_error(name: str, claimed: float, shown: float, allowance: float) -> None:
    """Compare a merge error that OUT claims with that of the tensors, up to what rounding may have moved it."""
    if not abs(claimed - shown) <= allowance + 1e-6:
        raise Failure(f"{PROVENANCE} claims a merge error of {claimed:.6f} for {name}, the tensors show {shown:.6f}")


def _check_source(origin: dict[str, Any], inputs: Inputs) -> None:
    """The recorded type, sizes and hashes are those of SOURCE as the user named it."""
    source, model_type = inputs.original, inputs.original_config.get("model_type")
    if origin["model_type"] != model_type:
        raise Failure(f"{PROVENANCE} claims a {origin['model_type']} as its source, which is a {model_type}")
    for name in (CONFIG, *source.files):
        file, stated = source.folder / name, origin["files"].get(name, {})
        expected: dict[str, Any] = {}
        if name != CONFIG:
            expected["bytes"] = file.stat().st_size
        if stated.get("sha256"):
            expected["sha256"] = file_sha256(file)
        compare_json(f"{PROVENANCE}: {name} of SOURCE", {key: stated.get(key) for key in expected}, expected)


def _cache_bytes(result: Result, kind: Kind) -> dict[str, int] | None:
    """Bytes of keys and values per token over all modules of one kind, in SOURCE and in OUT; None if there are none."""
    before = after = 0
    for module in result.geometry.modules:
        for tensor in module.tensors if module.kind == kind else ():
            if tensor.names[0].endswith(".weight"):
                itemsize = result.inputs.source.result_dtype(tensor.names[0]).itemsize
                width = sum(rows.shape[1] for role, rows in tensor.before.items() if role in ("key", "value"))
                before += module.before * width * itemsize
                after += module.after * width * itemsize
    return {"before": before, "after": after} if before else None
