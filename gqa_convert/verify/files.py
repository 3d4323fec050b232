"""The checks on the files of OUT: one complete set of weights and its index, the files taken over
from SOURCE, the tokenizer that transformers finds in them, and hashes.

The lists of file names repeat the converter's on purpose: a name that the converter forgets must
not pass here.
"""

import filecmp
import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.files import leads_out
from gqa_convert.errors import first_line
from gqa_convert.families.family import Modeling
from gqa_convert.families.loading import load_tokenizer, read_object
from gqa_convert.publishing.ownership import hash_file
from gqa_convert.verify.config import compare_json, in_json
from gqa_convert.verify.inputs import CONFIG, PROVENANCE, Inputs, JsonObject, Weights
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

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_TOKENIZER = "tokenizer.json tokenizer_config.json vocab.* merges.txt *.model *.spm *.tiktoken"
_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"
_FIRST = 1000
"""Token ids that are decoded."""


def open_result(folder: Path) -> tuple[Weights, str]:
    """OUT's tensors: it holds one set of safetensors files that agrees with its index, and no other
    weights.
    """
    present = {name for name in _list_files(folder) if _is_weights(name)}
    weight_map = None
    expected = files = [_SINGLE]
    if _SINGLE not in present:
        if _INDEX not in present:
            raise Failure(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        weight_map = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        files = sorted({Path(file).name for file in weight_map.values()})
        expected = [*files, _INDEX]
    if missing := set(expected) - present:
        raise Failure(f"{min(missing)} is missing, although {_INDEX} names it")
    if others := present.difference(expected):
        raise Failure(f"{min(others)} lies beside the weights: software may load it instead")
    out = Weights(folder, files, Failure)
    if weight_map is not None:
        compare_json(_INDEX, weight_map, out.file_of)
    size = sum((folder / file).stat().st_size for file in files)
    return out, f"{len(files)} weight file(s), {size:,} bytes"


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
        if filecmp.cmp(out / name, source / name, shallow=False):
            continue
        # earlier releases of transformers have another name for a class
        stated = read_object(source / name)
        renamed = in_json(stated | {"tokenizer_class": "PreTrainedTokenizerFast"})
        is_new = stated.get("tokenizer_class") == "TokenizersBackend"
        if (
            name != "tokenizer_config.json"
            or not is_new
            or in_json(read_object(out / name)) != renamed
        ):
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
    weights = [name for name in claims["written"] if name.endswith(".safetensors")]
    stated = {name: claims["written"][name].get("sha256") for name in weights}
    if set(stated.values()) == {None} and not (result and result.folds):
        return "none were recorded; the checks on tensors compare every bit"
    found = {path.name: hash_file(path)["sha256"] for path in out.glob("*.safetensors")}
    if changed := found.items() ^ stated.items():
        name = min(dict(changed))
        raise Failure(
            f"{name} has SHA-256 {found.get(name)}, recorded is {stated.get(name)}: it has changed "
            "since it was written"
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
    expected = dict(theirs)
    if inputs.family.model_type == "gpt_bigcode":  # transformers 5 has no tokenizer class for it
        expected["class name"] = ours["class name"]
    compare_json("OUT's tokenizer", ours, expected)
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
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [name for name in names if not re.search(r"(^|/)(\.|__pycache__/)", name)]


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
