"""The check on gqa_conversion.json: what OUT claims about its conversion, against configs and files."""

from gqa_convert.checkpoint.ownership import hash_file
from gqa_convert.verify.config import compare_json
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FACTORED, FITTED, Result
from gqa_convert.verify.weights import CONFIG, PROVENANCE


def check_provenance(result: Result) -> str:
    """The type, the heads and the method that OUT claims are those that the files show, and the type, the sizes and the
    hashes that it claims of SOURCE are those of the checkpoint that the user named.
    """
    inputs = result.inputs
    claims = inputs.claims
    geometry = result.geometry
    if not claims:
        raise Failure(f"{PROVENANCE} is missing, or no JSON object")
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion, which changed its tensors: "
            "verify the checkpoint that it was trained from"
        )
    route = "native" if inputs.has_class else "checkpoint's own code"
    truth = {
        "model_type": inputs.family.model_type,
        "heads": geometry.decoder[0].heads,
        "source_kv_heads": max(module.before for module in geometry.decoder),
        "groups": geometry.groups,
        "method": result.method,
        "encoder": bool(geometry.kinds["encoder"]),
        "route": "own file" if result.modeling else route,
    }
    compare_json(PROVENANCE, {key: claims.get(key) for key in truth}, truth)
    text = claims.get("calibration")
    was_read = text is not None and text["tokens"] > 0
    if was_read != result.has_text or (result.method != FACTORED and was_read != (result.method == FITTED)):
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {result.method}")
    origin = claims["source"]
    source = inputs.original
    stated_type = {"model_type": inputs.named.config.get("model_type")}
    compare_json(f"{PROVENANCE}: source", {"model_type": origin["model_type"]}, stated_type)
    for name in (CONFIG, *source.files):
        stated = origin["files"][name]
        # the bytes alone of large files that nobody asked to hash
        found = (
            hash_file(source.folder / name) if "sha256" in stated else {"bytes": (source.folder / name).stat().st_size}
        )
        compare_json(f"{PROVENANCE}: SOURCE's {name}", stated, found)
    return f"as the files show, method {result.method}"
