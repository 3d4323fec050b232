"""The check on gqa_conversion.json: what OUT claims about its conversion, against configs and tensors."""

from pathlib import Path
from typing import Any

from gqa_convert.families.family import Family
from gqa_convert.verify.checkpoint_reader import CONFIG, Weights, first_line, read_object
from gqa_convert.verify.files.hashes import file_sha256
from gqa_convert.verify.geometry import AttentionKind, Geometry
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.json_values import same_json
from gqa_convert.verify.proofs import CALIBRATED_PROOFS, PROOFS, Proof, proof_of
from gqa_convert.verify.report import Failure, Finding

PROVENANCE = "gqa_conversion.json"


def read_provenance(out: Path) -> dict[str, Any]:
    """OUT's claims.

    Raises:
        Failure: the record is missing or damaged.
    """
    try:
        return read_object(out / PROVENANCE)
    except (OSError, ValueError) as problem:
        raise Failure(f"{PROVENANCE} cannot be read ({first_line(problem)})") from None


def claims_of(out: Path) -> dict[str, Any]:
    """OUT's claims; empty if the record cannot be read, which the check on provenance reports."""
    try:
        return read_provenance(out)
    except Failure:
        return {}


def true_method(claimed: Any, geometry: Geometry) -> Any:
    """The method that OUT's heads show.

    Heads that do not become fewer are copied or repeated, whatever method was asked for.
    """
    changed = [counts for counts in geometry.every if counts.before != counts.after]
    if not changed:
        return "copy"
    return claimed if any(counts.after < counts.before for counts in changed) else "repeat"


def judged_method(claims: dict[str, Any], geometry: Geometry) -> Any:
    """The method by whose rules OUT's tensors are judged.

    With calibration text, the result of `factor` depends on the text and can only be measured, like that of `fit`.
    """
    method = true_method(claims.get("method", "mean"), geometry)
    if claims.get("calibration") is None or not isinstance(method, str) or method not in CALIBRATED_PROOFS:
        return method
    return next(name for name, proof in PROOFS.items() if proof is CALIBRATED_PROOFS[method])


def check_provenance(
    inputs: Inputs,
    geometry: Geometry,
    encoder: bool,
    errors: dict[str, float] | None,
) -> Finding:
    """Compare the claims with configs and tensors.

    Args:
        inputs: both checkpoints.
        geometry: of both.
        encoder: whether an encoder was converted.
        errors: the recomputed merge errors; None if other checks judge them or the tensors did not pass.
    """
    claims = read_provenance(inputs.out)
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion, which changed its tensors: "
            "verify the checkpoint that it was trained from"
        )
    method = true_method(claims.get("method"), geometry)
    _check_facts(claims, inputs.family, geometry, encoder, inputs.weights, method)
    _check_calibration(claims, method)
    _check_source(claims, inputs.original, inputs.original_config)
    if errors is not None:
        _check_errors(claims.get("merge_error"), errors)
    return Finding(f"{method}, {geometry.change()} K/V heads")


def _check_facts(
    claims: dict[str, Any], family: Family, geometry: Geometry, encoder: bool, source: Weights, method: Any
) -> None:
    truth = {
        "model_type": family.model_type,
        "heads": geometry.heads,
        "source_kv_heads": geometry.before,
        "groups": geometry.groups,
        "method": method,
        "encoder": encoder,
        "route": geometry.route(family),
        "kv_bytes_per_token": _cache_bytes(geometry, source, "decoder"),
        "cross_kv_bytes_per_encoder_token": _cache_bytes(geometry, source, "cross"),
    }
    for key, value in truth.items():
        if not same_json(claims.get(key), value):
            raise Failure(f"{PROVENANCE} claims {key} = {claims.get(key)!r}, expected {value!r}")


def _check_calibration(claims: dict[str, Any], method: Any) -> None:
    """A method that is proved by its predictions names its calibration text, others may, and most must not."""
    text = claims.get("calibration")
    named = isinstance(text, dict) and type(text.get("tokens")) is int and text["tokens"] > 0
    required = proof_of(method) is Proof.MEASURED
    allowed = named if required else text is None or (named and method in tuple(CALIBRATED_PROOFS))
    if not allowed:
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {method}")


def _check_source(claims: dict[str, Any], source: Weights, config: dict[str, Any]) -> None:
    """The recorded type, sizes and hashes are those of SOURCE as the user named it."""
    origin = claims.get("source")
    if not isinstance(origin, dict) or not isinstance(origin.get("files"), dict):
        raise Failure(f"{PROVENANCE} does not list the files of its source")
    files, stated, model_type = origin["files"], origin.get("model_type"), config.get("model_type")
    if stated != model_type:
        raise Failure(f"{PROVENANCE} claims a {stated} as its source, which is a {model_type}")
    for name in source.files:
        stated = files.get(name)
        size = (source.folder / name).stat().st_size
        if not isinstance(stated, dict) or stated.get("bytes") != size:
            raise Failure(f"{PROVENANCE} claims {stated!r} for {name}, which has {size} bytes in this SOURCE")
    for name in (CONFIG, *source.files):
        recorded = files[name].get("sha256") if isinstance(files.get(name), dict) else None
        if recorded is not None and recorded != file_sha256(source.folder / name):
            raise Failure(f"{PROVENANCE} claims SHA-256 {recorded} for {name}, which has another hash in this SOURCE")


def _check_errors(claimed: Any, errors: dict[str, float]) -> None:
    if not isinstance(claimed, dict) or set(claimed) != set(errors):
        raise Failure(f"{PROVENANCE} must have a merge_error for each of the {len(errors)} merged tensors and no other")
    for name, error in errors.items():
        stated = claimed[name]
        if not isinstance(stated, float | int) or not abs(stated - error) <= 0.01 * error + 1e-6:
            raise Failure(f"{PROVENANCE} claims a merge error of {stated!r} for {name}, the tensors show {error:.6f}")


def _cache_bytes(geometry: Geometry, source: Weights, attention_kind: AttentionKind) -> dict[str, int] | None:
    """Bytes of keys and values per token over all modules of one kind, in SOURCE and in OUT; None if there are none."""
    before = after = 0
    for name, cut in geometry.cuts.items():
        if cut.attention_kind == attention_kind and name.endswith(".weight"):
            counts = geometry.of(name, attention_kind)
            numbers = sum(run.head_dim for run in cut.runs if run.part in ("key", "value"))
            before += counts.before * numbers * source.result_dtype(name).itemsize
            after += counts.after * numbers * source.result_dtype(name).itemsize
    return {"before": before, "after": after} if before else None
