"""The checks on gqa_conversion.json: what OUT claims about its conversion, against configs and tensors."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gqa_convert.families.rotary import rotary_pairs
from gqa_convert.verify.config import same_json
from gqa_convert.verify.files import PROVENANCE, file_sha256
from gqa_convert.verify.geometry import Geometry, Kind, Role
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.optimum import (
    check_optimum,
    loss_between,
    read_heads,
    score_products,
    value_products,
)
from gqa_convert.verify.report import Failure, first_line
from gqa_convert.verify.tensors import CALIBRATED, FITTED, MergeError
from gqa_convert.verify.weights import CONFIG, Weights, read_object


def read_claims(out: Path) -> dict[str, Any]:
    """OUT's provenance record.

    Raises:
        Failure: it is missing or damaged.
    """
    try:
        return read_object(out / PROVENANCE)
    except (OSError, ValueError) as problem:
        raise Failure(f"{PROVENANCE} cannot be read ({first_line(problem)})") from None


def shown_method(claimed: Any, geometry: Geometry) -> Any:
    """The method that OUT's heads show: heads that do not become fewer are copied or repeated, whatever was asked for."""
    if not geometry.changed:
        return "copy"
    return claimed if any(module.after < module.before for module in geometry.changed) else "repeat"


def judged_method(claims: dict[str, Any], geometry: Geometry) -> Any:
    """The method by whose rules OUT's tensors are judged.

    With calibration text, the result of `factor` depends on the text and can only be measured, like that of `fit`.
    """
    method = shown_method(claims.get("method", "mean"), geometry)
    if claims.get("calibration") is None or not isinstance(method, str):
        return method
    return CALIBRATED.get(method, method)


def check_provenance(
    inputs: Inputs, geometry: Geometry, route: str, encoder: bool, errors: dict[str, MergeError] | None
) -> str:
    """Compare the claims with configs and tensors.

    Args:
        inputs: both checkpoints.
        geometry: of both.
        route: what loads OUT.
        encoder: whether an encoder was converted.
        errors: the recomputed merge errors; None if other checks judge them or the tensors did not pass.
    """
    claims = read_claims(inputs.out)
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion, which changed its tensors: "
            "verify the checkpoint that it was trained from"
        )
    method = shown_method(claims.get("method"), geometry)
    truth = {
        "model_type": inputs.family.model_type,
        "heads": geometry.heads,
        "source_kv_heads": geometry.before,
        "groups": geometry.groups,
        "method": method,
        "encoder": encoder,
        "route": route,
        "kv_bytes_per_token": _cache_bytes(geometry, inputs.source, "decoder"),
        "cross_kv_bytes_per_encoder_token": _cache_bytes(geometry, inputs.source, "cross"),
    }
    for key, value in truth.items():
        if not same_json(claims.get(key), value):
            raise Failure(f"{PROVENANCE} claims {key} = {claims.get(key)!r}, expected {value!r}")
    _check_calibration(claims.get("calibration"), method)
    _check_source(claims.get("source"), inputs.original, inputs.original_config)
    if errors is not None:
        _check_errors(claims.get("merge_error"), errors)
    return f"{method}, {geometry.change()} K/V heads"


def _check_calibration(text: Any, method: Any) -> None:
    """A fit names its calibration text, other methods that accept one may, and most must not."""
    named = isinstance(text, dict) and type(text.get("tokens")) is int and text["tokens"] > 0
    allowed = named if method in FITTED else text is None or (named and method in tuple(CALIBRATED))
    if not allowed:
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {method}")


def _check_source(origin: Any, source: Weights, config: dict[str, Any]) -> None:
    """The recorded type, sizes and hashes are those of SOURCE as the user named it."""
    if not isinstance(origin, dict) or not isinstance(origin.get("files"), dict):
        raise Failure(f"{PROVENANCE} does not list the files of its source")
    files, model_type = origin["files"], config.get("model_type")
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


def _check_errors(claimed: Any, errors: dict[str, MergeError]) -> None:
    if not isinstance(claimed, dict) or set(claimed) != set(errors):
        raise Failure(f"{PROVENANCE} must have a merge_error for each of the {len(errors)} merged tensors and no other")
    for name, error in errors.items():
        stated, found = claimed[name], error.value()
        if not isinstance(stated, float | int) or not abs(stated - found) <= 0.01 * found + 1e-6:
            raise Failure(f"{PROVENANCE} claims a merge error of {stated!r} for {name}, the tensors show {found:.6f}")


def _cache_bytes(geometry: Geometry, source: Weights, kind: Kind) -> dict[str, int] | None:
    """Bytes of keys and values per token over all modules of one kind, in SOURCE and in OUT; None if there are none."""
    before = after = 0
    for module in geometry.modules:
        for tensor in module.tensors:
            name = tensor.names[0]
            widths = [rows.shape[1] for role, rows in tensor.before.items() if role in ("key", "value")]
            if module.kind == kind and name.endswith(".weight"):
                nbytes = sum(widths) * source.result_dtype(name).itemsize
                before += module.before * nbytes
                after += module.after * nbytes
    return {"before": before, "after": after} if before else None


def check_functions(
    inputs: Inputs,
    out: Weights,
    claims: dict[str, Any],
    geometry: Geometry,
    method: Any,
    foldable: dict[str, frozenset[Role]],
) -> str:
    """For a method that changes queries and outputs: the errors that OUT claims are possible and of SOURCE's modules, and
    for `factor` they are those of the tensors, and no shared head could lose less.

    Args:
        inputs: both checkpoints.
        out: OUT's tensors.
        claims: OUT's record.
        geometry: of both.
        method: by whose rules OUT is judged.
        foldable: the roles of each module that it may change.
    """
    modules = {module.name: module for module in geometry.modules}
    errors, orders = _read_errors(claims, modules), read_orders(claims, geometry)
    for name in foldable:
        module = modules[name]
        stated = [error for error in errors if error.rpartition(".")[0] == name]
        if not stated or (method not in FITTED and len(stated) < 2):
            raise Failure(f"{PROVENANCE} has no merge_error for the keys or the values of {name}")
        if method in FITTED:
            continue
        source = read_heads(inputs.source, module, module.before, converted=False)
        if name in orders:
            source = source.ordered(orders[name])
        merged = read_heads(out, module, module.before, converted=True)
        pairs: tuple[list[int], list[int]] = ([], [])
        if module.kind != "cross":
            real, imaginary = rotary_pairs(inputs.family, inputs.decoder_config, source.keys.shape[1]).tolist()
            pairs = real, imaginary
        try:
            check_optimum(source, merged, module.after, pairs, foldable[name])
        except Failure as failure:
            raise Failure(f"{name}: {failure}, which {method} does not make") from None
        losses = (
            (f"{name}.keys", loss_between(score_products(source, pairs), score_products(merged, pairs))),
            (f"{name}.values", loss_between([value_products(source)], [value_products(merged)])),
        )
        for part, loss in losses:
            allowed = loss.allowance / math.sqrt(loss.total) if loss.total else 1e-7
            if not abs(errors[part] - loss.error) <= allowed + 1e-6:
                raise Failure(
                    f"{PROVENANCE} claims a merge error of {errors[part]:.6f} for {part}, the tensors show {loss.error:.6f}"
                )
    strays = [error for name, error in errors.items() if name.rpartition(".")[0] not in foldable and error > 1e-6]
    if strays:
        raise Failure(f"{PROVENANCE} claims a merge error of {max(strays):.6f} for a module that was not merged")
    if method in FITTED:
        return f"recorded for {len(foldable)} attention modules; the models show what they are worth"
    return f"no shared head of {len(foldable)} attention modules could lose less"


def _read_errors(claims: dict[str, Any], modules: Iterable[str]) -> dict[str, float]:
    errors = claims.get("merge_error")
    if not isinstance(errors, dict) or not errors:
        raise Failure(f"{PROVENANCE} has no merge_error")
    for name, error in errors.items():
        if not isinstance(error, float | int) or isinstance(error, bool) or not math.isfinite(error) or error < 0:
            raise Failure(f"{PROVENANCE} claims a merge error of {error!r} for {name}, expected a number of at least 0")
        if name.rpartition(".")[0] not in modules:
            raise Failure(f"{PROVENANCE} claims a merge error for {name}, which is not an attention module of SOURCE")
    return errors


def read_orders(claims: dict[str, Any], geometry: Geometry) -> dict[str, list[int]]:
    """The order in which OUT claims that SOURCE's K/V heads were merged, by module, where it is not their own.

    Raises:
        Failure: a claim is not an order of a module's heads.
    """
    orders = claims.get("head_order") or {}
    counts = {module.name: module.before for module in geometry.modules}
    if not isinstance(orders, dict) or not set(orders) <= set(counts):
        raise Failure(f"{PROVENANCE} claims head_order = {orders!r}, which names no modules of SOURCE")
    for name, order in orders.items():
        if not isinstance(order, list) or sorted(order, key=str) != sorted(range(counts[name]), key=str):
            raise Failure(
                f"{PROVENANCE} claims head_order = {order!r} for {name}, expected its {counts[name]} K/V heads"
            )
    return orders
