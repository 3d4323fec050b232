"""The checks on files other than tensors and config: a complete folder, the index, what is carried over, what is
claimed.
"""

import hashlib
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gqa_convert.families.table import Family
from gqa_convert.verify.checkpoint_reader import INDEX, SINGLE, Weights, first_line, read_object
from gqa_convert.verify.config import CONFIG, same_json
from gqa_convert.verify.geometry import AttentionKind, Geometry
from gqa_convert.verify.proofs import CALIBRATED_PROOFS, PROOFS, Proof, proof_of
from gqa_convert.verify.report import Failure

PROVENANCE = "gqa_conversion.json"

_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.ckpt.*",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.tflite",
    "*.distcp",
    "*.npz",
    "*.nemo",
    "*.mlmodel",
)
_FOREIGN_FOLDERS = ("original/", "onnx/", "coreml/", "openvino/", "metal/", "global_step")
_LEFTOVERS = (".spilled-*", ".share-probe", ".gqa-convert-unfinished")
_PROSE = ("*.md", "LICENSE*", "NOTICE*", "*.png", "*.svg", "*.jpg", "*.pdf")
"""Files that no software reads: a model card may be rewritten after the conversion."""


def list_files(folder: Path) -> list[str]:
    """Every file's path relative to the folder, without hidden ones (but a conversion's leftovers) and Python's
    caches.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        kept = [name for name in names if not name.startswith(".") or _matches(name, _LEFTOVERS)]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in kept]
    return sorted(found)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in patterns)


def _is_weights(name: str) -> bool:
    return _matches(name, _WEIGHTS) or name.startswith(_FOREIGN_FOLDERS)


def check_files(out: Weights, source: Weights) -> str:
    """One set of safetensors files that agrees with its index, and no weights beside it."""
    if not out.files[0].endswith(".safetensors"):
        raise Failure(f"the weights are in {out.chosen} where safetensors belong")
    for name in list_files(out.folder):
        if _matches(name, _LEFTOVERS):
            raise Failure(f"{name} is left over from an unfinished conversion")
        if _is_weights(name) and name not in out.files and name != out.chosen:
            raise Failure(f"{name} lies beside the weights that {out.chosen} names: it may be loaded in their stead")
    if out.index is not None:
        stated = out.index["weight_map"]
        wrong = sorted(name for name in set(stated) | set(out.file_of) if stated.get(name) != out.file_of.get(name))
        if wrong:
            name = wrong[0]
            there = f"{stated.get(name)}, the files have it in {out.file_of.get(name)}"
            raise Failure(f"{INDEX} has {name} in {there} ({len(wrong)} such)")
    safe = all(file.endswith(".safetensors") and source.metadata(file).get("format") for file in source.files)
    for file in out.files:
        if (safe or not source.files[0].endswith(".safetensors")) and out.metadata(file).get("format") != "pt":
            raise Failure(f"{file} lacks the metadata format = pt, which older clients demand")
    size = sum((out.folder / file).stat().st_size for file in out.files)
    return f"{len(out.files)} weight file(s), {size:,} bytes"


def check_index(out: Weights, source: Weights) -> str:
    """The totals in the index are those of the tensors; its other metadata is the source's."""
    if out.index is None:
        return f"none needed beside a single {SINGLE}"
    metadata = out.index.get("metadata")
    totals = {"total_size": sum(map(out.nbytes, out.file_of)), "total_parameters": sum(map(out.numbers, out.file_of))}
    if not isinstance(metadata, dict):
        raise Failure(f"{INDEX} has no metadata, which transformers needs")
    for key, value in totals.items():
        if metadata.get(key) != value or isinstance(metadata.get(key), bool):
            raise Failure(f"{INDEX} states {key} = {metadata.get(key)!r} where the tensors make {value}")
    theirs = (source.index or {}).get("metadata") or {}
    for key in (set(metadata) | set(theirs)) - set(totals):
        if not same_json(metadata.get(key), theirs.get(key)):
            raise Failure(f"{INDEX} has {key} = {metadata.get(key)!r} where SOURCE has {theirs.get(key)!r}")
    return ", ".join(f"{key} {value:,}" for key, value in totals.items())


def check_carried(out: Path, source: Path, modelling_file: str | None, elsewhere: frozenset[str] = frozenset()) -> str:
    """Tokenizer, generation config, templates, code: every other file of SOURCE, byte for byte, and no new one to be
    read.

    Args:
        out: the converted folder.
        source: the source's folder.
        modelling_file: the name of one that OUT brings along, which has a check of its own.
        elsewhere: names of more files that have.
    """
    own = {CONFIG, PROVENANCE, modelling_file, *elsewhere}
    theirs = [name for name in list_files(source) if not _is_weights(name) and name not in own]
    ours = [name for name in list_files(out) if not _is_weights(name) and name not in own]
    judged = [name for name in theirs if not _matches(name, _PROSE)]
    for name in judged:
        if not (out / name).is_file():
            raise Failure(f"{name} of SOURCE is missing")
        if not _same_file(out / name, source / name) and not _is_renamed_tokenizer(out / name, source / name):
            raise Failure(f"{name} differs from SOURCE's")
    extra = [name for name in ours if name not in theirs and not _matches(name, _PROSE)]
    if extra:
        raise Failure(f"{extra[0]} is not in SOURCE ({len(extra)} such)")
    return f"{len(judged)} file(s), byte for byte"


def _is_renamed_tokenizer(ours: Path, theirs: Path) -> bool:
    """Whether a tokenizer_config.json differs by nothing but the name that clients before transformers 5 know its class
    by.
    """
    if ours.name != "tokenizer_config.json":
        return False
    try:
        stated, original = read_object(ours), read_object(theirs)
    except (OSError, ValueError):
        return False
    return original.get("tokenizer_class") == "TokenizersBackend" and same_json(
        stated, original | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def _same_file(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as one, b.open("rb") as other:
        while block := one.read(1 << 20):
            if block != other.read(1 << 20):
                return False
    return True


def read_provenance(out: Path) -> dict[str, Any]:
    """What OUT claims of its making; Failure if there is nothing to read."""
    try:
        return read_object(out / PROVENANCE)
    except (OSError, ValueError) as problem:
        raise Failure(f"{PROVENANCE} cannot be read ({first_line(problem)})") from None


def claimed_route(out: Path) -> Any:
    """Which way OUT says that it was made; None if it doesn't."""
    try:
        return read_provenance(out).get("route")
    except Failure:  # reported by the check on provenance
        return None


def true_method(claimed: Any, geometry: Geometry) -> Any:
    """What must have happened: heads that do not become fewer are copied or repeated, whatever was asked for."""
    counts = [counts for counts in geometry.counts.values() if counts.before != counts.after]
    if not counts:
        return "copy"
    return claimed if any(one.after < one.before for one in counts) else "repeat"


def judged_method(method: Any, claims: dict[str, Any]) -> Any:
    """By which method's rules OUT is judged: what `factor` made of calibration text can only be measured, like what
    `fit` made.
    """
    if claims.get("calibration") is None or not isinstance(method, str) or method not in CALIBRATED_PROOFS:
        return method
    return next(name for name, proof in PROOFS.items() if proof is CALIBRATED_PROOFS[method])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_provenance(
    claims: dict[str, Any],
    family: Family,
    geometry: Geometry,
    encoder: bool,
    source: Weights,
    errors: dict[str, float] | None,
) -> str:
    """The claims against config and tensors.

    Args:
        claims: the provenance file of OUT.
        family: of SOURCE.
        geometry: of both.
        encoder: whether an encoder was converted.
        source: tensors of SOURCE.
        errors: merge errors as recomputed, or None if the tensors themselves did not pass.
    """
    if claims.get("uptraining_tokens"):
        raise Failure(
            f"OUT was trained on {claims['uptraining_tokens']} tokens after its conversion: its tensors are its own; verify what it was "
            "trained from"
        )
    truth = {
        "model_type": family.model_type,
        "heads": geometry.heads,
        "source_kv_heads": geometry.before,
        "groups": geometry.after,
        "method": true_method(claims.get("method"), geometry),
        "encoder": encoder,
        "route": geometry.route(family),
        "kv_bytes_per_token": _cache_bytes(geometry, source, "decoder"),
        "cross_kv_bytes_per_encoder_token": _cache_bytes(geometry, source, "cross"),
    }
    for key, value in truth.items():
        if not same_json(claims.get(key), value):
            raise Failure(f"{PROVENANCE} claims {key} = {claims.get(key)!r} where {value!r} is true")
    random = truth["method"] == "random"
    if random != (type(claims.get("seed")) is int):
        raise Failure(f"{PROVENANCE} claims seed = {claims.get('seed')!r} for method {truth['method']}")
    text = claims.get("calibration")
    told = isinstance(text, dict) and type(text.get("tokens")) is int and text["tokens"] > 0
    if (
        not (told or text is None)
        or (proof_of(truth["method"]) is Proof.MEASURED and not told)
        or (told and truth["method"] not in tuple(CALIBRATED_PROOFS))
    ):
        raise Failure(f"{PROVENANCE} claims calibration = {text!r} for method {truth['method']}")
    origin = claims.get("source")
    files = origin.get("files") if isinstance(origin, dict) else None
    if not isinstance(files, dict):
        raise Failure(f"{PROVENANCE} does not list the files of its source")
    for name in source.files:
        stated = files.get(name)
        size = (source.folder / name).stat().st_size
        if not isinstance(stated, dict) or stated.get("bytes") != size:
            raise Failure(f"{PROVENANCE} claims {stated!r} for {name}, which has {size} bytes in this SOURCE")
    for name in (CONFIG, *source.files):
        recorded = files[name].get("sha256") if isinstance(files.get(name), dict) else None
        if recorded is not None and recorded != _sha256(source.folder / name):
            raise Failure(f"{PROVENANCE} claims SHA-256 {recorded} for {name}, which has another in this SOURCE")
    if errors is not None:
        _check_errors(claims.get("merge_error"), errors)
    ending = f", seed {claims['seed']}" if random else ""
    return f"{truth['method']}, {geometry.before} -> {geometry.after} K/V heads{ending}"


def check_hashes(out: Path, claims: dict[str, Any]) -> str:
    """The weight files against the SHA-256 that was recorded when they were written: changes that no other check can
    see.
    """
    result = claims.get("result")
    files = result.get("files") if isinstance(result, dict) else None
    if not isinstance(files, dict):
        raise Failure(f"{PROVENANCE} claims result = {result!r}, which lists no files")
    for name, stated in files.items():
        if not isinstance(stated, dict) or not (out / name).is_file():
            raise Failure(f"{PROVENANCE} claims {stated!r} for {name}, which is missing")
        if stated.get("sha256") != (found := _sha256(out / name)):
            raise Failure(f"{name} has SHA-256 {found} where {stated.get('sha256')} was written: it has changed since")
    return f"{len(files)} weight file(s) as they were written"


def _check_errors(claimed: Any, errors: dict[str, float]) -> None:
    if not isinstance(claimed, dict) or set(claimed) != set(errors):
        raise Failure(f"{PROVENANCE} has no merge_error for each of the {len(errors)} merged tensors, or has more")
    for name, error in errors.items():
        stated = claimed[name]
        if not isinstance(stated, float | int) or not abs(stated - error) <= 0.01 * error + 1e-6:
            raise Failure(f"{PROVENANCE} claims a merge error of {stated!r} for {name} where {error:.6f} is true")


def _cache_bytes(geometry: Geometry, source: Weights, attention_kind: AttentionKind) -> dict[str, int] | None:
    """Bytes of keys and values per token over all modules of a place, in SOURCE and in OUT; None where there is
    none.
    """
    width = 0
    for name, cut in geometry.cuts.items():
        if cut.attention_kind == attention_kind and name.endswith(".weight"):
            width += sum(run.width * source.dtype(name).itemsize for run in cut.runs if run.part in ("key", "value"))
    if not width:
        return None
    counts = geometry.counts[attention_kind]
    return {"before": int(counts.before * width), "after": int(counts.after * width)}
