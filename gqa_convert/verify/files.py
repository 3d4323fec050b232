"""The checks on the files of OUT: one complete set of weights and its index, the files taken over
from SOURCE, the tokenizer that transformers finds in them, and hashes.

The lists of file names repeat the converter's on purpose: a name that the converter forgets must
not pass here.
"""

import json
import re
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.files import leads_out
from gqa_convert.errors import first_line
from gqa_convert.families.family import MODELING
from gqa_convert.families.loading import load_tokenizer, read_object
from gqa_convert.publishing.ownership import hash_file

from .config import compare_json
from .inputs import CONFIG, PROVENANCE, Inputs, JsonObject, Weights
from .report import Failure
from .result import Result

_WEIGHTS = re.compile(
    r"""
    \.(safetensors|bin)(\.index\.(.*\.)?json)?$
    | \.(pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|ot|tflite|distcp|npz|nemo|mlmodel)$
    | \.ckpt\.
    | ^(original|onnx|coreml|openvino|metal|global_step[^/]*)/
    """,
    re.VERBOSE,
)
"""Files of weights, and folders in which a checkpoint holds the same weights in another format."""
_PROSE = re.compile(r"\.(md|png|svg|jpg|pdf)$|(^|/)README\.md\.old[^/]*$")
"""Files that no software reads. A model card may be rewritten after the conversion."""
_TERMS = re.compile(r"(^|/)(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[^/]*$", re.IGNORECASE)
"""Files that nobody may take away or change; a user may add some."""
_IGNORED = re.compile(r"(^|/)(\.|__pycache__/)")
"""Hidden files, and Python's caches."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_TOKENIZER = re.compile(
    r"^(tokenizer(_config)?\.json|vocab\..*|merges\.txt|.*\.(model|spm|tiktoken))$"
)
_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"
_FIRST = 1000
"""Token ids that are decoded."""


def open_result(folder: Path) -> Weights:
    """OUT's tensors: it holds one set of safetensors files that agrees with its index, and no other
    weights.
    """
    present = set(filter(_WEIGHTS.search, _list_files(folder)))
    expected, weight_map = {_SINGLE}, {}
    if _INDEX in present:
        weight_map = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        expected = {_INDEX, *(Path(file).name for file in weight_map.values())}
    if missing := expected - present:
        raise Failure(f"{min(missing)} is missing")
    if others := present - expected:
        raise Failure(f"{min(others)} lies beside the weights: software may load it instead")
    out = Weights(folder, sorted(expected - {_INDEX}), Failure)
    if weight_map:
        compare_json(_INDEX, weight_map, out.file_of)
    return out


def check_copied(result: Result) -> str:
    """OUT has every other file of SOURCE, byte for byte, the package's own modelling file if it
    needs one, and no new file that software reads.
    """
    out, source = result.inputs.out, result.inputs.source.folder
    written = {CONFIG, PROVENANCE}
    expected: JsonObject = {}
    for name in _sidecar_files(source) - written:
        if not leads_out(source / name, source):
            expected[name] = hash_file(source / name)
    for file in result.modeling.files if result.modeling else ():
        expected[file.name] = hash_file(file)
    found: JsonObject = {}
    for name in _sidecar_files(out) - written:
        if name in expected or not _TERMS.search(name):
            found[name] = hash_file(out / name)
    # a class that earlier releases of transformers call otherwise is renamed
    name = "tokenizer_config.json"
    tokenizer = read_object(source / name)
    is_new = tokenizer.get("tokenizer_class") == "TokenizersBackend"
    if is_new and found.get(name) != expected.get(name):
        expected[name] = tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"}
        found[name] = read_object(out / name)
    compare_json(f"files of OUT (gqa_*.py must be those in {MODELING})", found, expected)
    return f"{len(expected)} file(s), byte for byte"


def check_hashes(result: Result) -> str:
    """OUT's weight files are those that were written. Methods that fold record hashes always,
    because no other check sees every bit.
    """
    written = result.inputs.claims["written"]
    weights = [name for name in written if name.endswith(".safetensors")]
    stated = {name: written[name].get("sha256") for name in weights}
    if set(stated.values()) == {None} and not result.folds:
        return "none were recorded; the checks on tensors compare every bit"
    files = result.inputs.out.glob("*.safetensors")
    found = {path.name: hash_file(path)["sha256"] for path in files}
    compare_json("SHA-256 of a file, so that it has changed since it was written", found, stated)
    return f"{len(stated)} weight file(s) as they were written"


def check_tokenizer(inputs: Inputs) -> str:
    """transformers finds the same tokenizer for OUT, whose model type is another, as for SOURCE,
    without running code.
    """
    source = inputs.original.folder
    if not any(_TOKENIZER.search(path.name) for path in source.iterdir()):
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
    """The paths of all files relative to the folder."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [name for name in names if not _IGNORED.search(name)]


def _sidecar_files(folder: Path) -> set[str]:
    """The files of a checkpoint that software reads besides its weights, and its terms."""
    others = [name for name in _list_files(folder) if not _WEIGHTS.search(name)]
    return {name for name in others if _TERMS.search(name) or not _PROSE.search(name)}
