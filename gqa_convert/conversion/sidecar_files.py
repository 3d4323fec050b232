"""Writes what lies beside the weights of a result: index, config, tokenizer, modelling file."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.source import CONFIG, Checkpoint
from gqa_convert.conversion.plan import Plan
from gqa_convert.publishing.atomic_files import sync, write_json
from gqa_convert.runtime.json_objects import JsonObject

_TOKENIZER_CONFIG = "tokenizer_config.json"


def write_sidecar_files(plan: Plan, folder: Path) -> None:
    """Write the index, the config, the modelling file if one is needed, and a copy of every other file of the source,
    of which only the tokenizer's config may change.

    Args:
        plan: of a checkpoint on this machine.
        folder: where the result's weights are.
    """
    totals = {"total_size": plan.weight_bytes_after, "total_parameters": plan.parameters_after}
    write_index(
        folder,
        {file.file: file.names for file in plan.files},
        (plan.checkpoint.index_metadata or {}) | totals,
    )
    copy_files(plan.checkpoint, folder)
    for file in plan.modeling.files if plan.modeling else ():
        _copy(file, folder / file.name)
    (folder / PROVENANCE).unlink(missing_ok=True)
    write_json(folder / CONFIG, plan.config)
    # transformers 5 writes a name that earlier versions do not know
    path = folder / _TOKENIZER_CONFIG
    if (stated := _read_object(path)).get("tokenizer_class") == "TokenizersBackend":
        write_json(path, stated | {"tokenizer_class": "PreTrainedTokenizerFast"})


def copy_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy and sync the sidecar files of a checkpoint on this machine.

    A source in another form may need values in its tokenizer's config that the tokenizer's class used to imply.
    """
    for name in checkpoint.carried:
        _copy(checkpoint.local_folder / name, folder / name)
    path = folder / _TOKENIZER_CONFIG
    has_tokenizer = path.is_file() or (folder / "tokenizer.json").is_file()
    if has_tokenizer and checkpoint.tokenizer_defaults:
        stated = _read_object(path)
        missing = {
            key: value for key, value in checkpoint.tokenizer_defaults.items() if key not in stated
        }
        if str(stated.get("tokenizer_class") or checkpoint.config["tokenizer_class"]).startswith(
            "GPT2Tokenizer"
        ):
            write_json(path, stated | missing)


def write_index(folder: Path, files: Mapping[str, Collection[str]], metadata: JsonObject) -> None:
    """Write the index of weight files, unless there is only the one that needs none.

    Args:
        folder: where it goes.
        files: the names of the tensors in each file.
        metadata: of the index.
    """
    if list(files) == [formats.SAFETENSORS_SINGLE]:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / formats.SAFETENSORS_INDEX, index)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    sync(target)


def _read_object(path: Path) -> JsonObject:
    """The JSON object in a file; empty without one."""
    try:
        stated = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return stated if isinstance(stated, dict) else {}
