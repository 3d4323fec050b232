"""The checks on the files of OUT: one complete set of weights and its index, the files taken over
from SOURCE, the tokenizer that transformers finds in them, and hashes.

The lists of file names repeat the converter's on purpose: a name that the converter forgets must
not pass here.
"""

import filecmp
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.files import leads_out
from gqa_convert.errors import first_line
from gqa_convert.families.family import Modeling
from gqa_convert.families.loading import load_tokenizer, read_object
from gqa_convert.publishing.ownership import hash_file
from gqa_convert.verify.config import compare_json, in_json
from gqa_convert.verify.inputs import CONFIG, INDEX, PROVENANCE, Inputs, JsonObject, Weights
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import Result

_WEIGHTS = """
*.safetensors *.safetensors.index.json *.safetensors.index.*.json
*.bin *.bin.index.json *.bin.index.*.json *.pt *.pth *.ckpt *.ckpt.* *.h5 *.msgpack
*.gguf *.onnx *.onnx_data *.ot *.tflite *.distcp *.npz *.nemo *.mlmodel
"""
_FOREIGN_FOLDERS = ("original/", "onnx/", "coreml/", "openvino/", "metal/", "global_step")
"""Folders in which a checkpoint holds the same weights in another format."""
_PROSE = "*.md README.md.old* *.png *.svg *.jpg *.pdf"
"""Files that no software reads. A model card may be rewritten after the conversion."""
_TERMS = "LICEN[CS]E* NOTICE* COPYING* USE_POLICY*"
"""Files that nobody may take away or change; a user may add some."""

_TOKENIZER = "tokenizer.json tokenizer_config.json vocab.* merges.txt *.model *.spm *.tiktoken"
_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"
_FIRST = 1000
"""Token ids that are decoded."""


def open_result(folder: Path) -> tuple[Weights, str]:
    """OUT's tensors: it holds one set of safetensors files that agrees with its index, and no other
    weights.
    """
    out = Weights(folder)
    if not out.files[0].endswith(".safetensors"):
        raise Failure(f"the weights are in {out.chosen}, expected safetensors files")
    for name in _list_files(folder):
        if _is_weights(name) and name not in (*out.files, out.chosen):
            raise Failure(
                f"{name} lies beside the weights in {out.chosen}: software may load it instead"
            )
    if out.weight_map is not None:
        compare_json(INDEX, out.weight_map, out.file_of)
    size = sum((folder / file).stat().st_size for file in out.files)
    return out, f"{len(out.files)} weight file(s), {size:,} bytes"


def check_copied(inputs: Inputs, modeling: Modeling | None) -> str:
    """OUT has every other file of SOURCE, byte for byte, and no new file that software reads.

    Args:
        inputs: the checkpoints.
        modeling: whose files another check compares.
    """
    out = inputs.out
    source = inputs.source.folder
    written = {CONFIG, PROVENANCE}
    if modeling:
        written |= {file.name for file in modeling.files}
    ours = _sidecar_files(out) - written
    theirs = _sidecar_files(source) - written
    theirs -= {name for name in theirs if leads_out(source / name, source)}
    if missing := theirs - ours:
        raise Failure(f"{min(missing)} of SOURCE is missing")
    if extra := {name for name in ours - theirs if not _is_term(name)}:
        raise Failure(f"{min(extra)} is not in SOURCE ({len(extra)} extra files)")
    for name in sorted(theirs):
        is_same = filecmp.cmp(out / name, source / name, shallow=False)
        if name == "tokenizer_config.json":
            is_same = is_same or _is_renamed_tokenizer(out / name, source / name)
        if not is_same:
            raise Failure(f"{name} differs from SOURCE's")
    return f"{len(theirs)} file(s), byte for byte"


def check_hashes(inputs: Inputs, result: Result | None) -> str:
    """OUT's weight files are those that were written. Methods that fold record hashes always,
    because no other check sees every bit.

    Args:
        inputs: the checkpoints.
        result: OUT, if its heads were found.
    """
    out, claims = inputs.out, inputs.claims
    if claims["result"] is None and not (result and result.folds):
        return "none were recorded; the checks on tensors compare every bit"
    stated = {name: file["sha256"] for name, file in claims["result"]["files"].items()}
    for name in sorted(stated.keys() | {path.name for path in out.glob("*.safetensors")}):
        if name not in stated:
            raise Failure(f"{PROVENANCE} has no hash of {name}")
        found = hash_file(out / name)["sha256"]
        if found != stated[name]:
            raise Failure(
                f"{name} has SHA-256 {found}, expected {stated[name]}: it has changed since it was "
                "written"
            )
    return f"{len(stated)} weight file(s) as they were written"


def check_tokenizer(inputs: Inputs) -> str:
    """transformers finds the same tokenizer for OUT, whose model type is another, as for SOURCE,
    without running code.
    """
    source = inputs.original.folder
    if not any(_matches(path.name, _TOKENIZER) for path in source.iterdir()):
        return "SOURCE has none"
    try:
        theirs = _behaviour(load_tokenizer(source))
    except Exception as problem:
        return f"SOURCE has none that transformers can use ({first_line(problem)})"
    ours = _behaviour(load_tokenizer(inputs.out))
    for what, expected in theirs.items():
        # transformers 5 has no tokenizer class for gpt_bigcode, so that its class may be another
        may_differ = what == "class name" and inputs.family.model_type == "gpt_bigcode"
        if ours[what] != expected and not may_differ:
            found, wanted = repr(ours[what])[:200], repr(expected)[:200]
            raise Failure(f"{what} {found}, expected {wanted} as in SOURCE")
    return (
        f"{ours['class name']} of {ours['size']:,} tokens, which do what those of SOURCE's "
        f"{theirs['class name']} do"
    )


def _behaviour(tokenizer: Any) -> JsonObject:
    """What a tokenizer makes of samples."""
    ids = tokenizer(_SAMPLE, verbose=False)["input_ids"]
    first = range(min(len(tokenizer), _FIRST))
    return {
        "class name": type(tokenizer).__name__,
        "size": len(tokenizer),
        "special tokens": tokenizer.special_tokens_map,
        "token ids of a sample": ids,
        "text of a sample": tokenizer.decode(ids),
        "text of its first tokens": tokenizer.decode(list(first)),
    }


def _list_files(folder: Path) -> list[str]:
    """The paths of all files relative to the folder, except hidden files and Python's caches."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return [name.as_posix() for name in names if not any(map(_is_hidden, name.parts))]


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _sidecar_files(folder: Path) -> set[str]:
    """The files of a checkpoint that software reads besides its weights, and its terms."""
    others = [name for name in _list_files(folder) if not _is_weights(name)]
    return {name for name in others if _is_term(name) or not _matches(name, _PROSE)}


def _matches(name: str, patterns: str) -> bool:
    """Whether a file's name, without its folders, matches one of the patterns."""
    return any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in patterns.split())


def _is_term(name: str) -> bool:
    """Whether a file holds terms of a licence."""
    return _matches(name.upper(), _TERMS)


def _is_weights(name: str) -> bool:
    """Whether a file holds weights."""
    return _matches(name, _WEIGHTS) or ("/" in name and name.startswith(_FOREIGN_FOLDERS))


def _is_renamed_tokenizer(ours: Path, theirs: Path) -> bool:
    """Whether two tokenizer configs differ only in the class, for which earlier releases of
    transformers have another name.
    """
    original = read_object(theirs)
    renamed = original | {"tokenizer_class": "PreTrainedTokenizerFast"}
    was_new = original.get("tokenizer_class") == "TokenizersBackend"
    return was_new and in_json(read_object(ours)) == in_json(renamed)
