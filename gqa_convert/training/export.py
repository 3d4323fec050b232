"""Exports the trained model as an ordinary checkpoint: weights in the dtype of the initial checkpoint, other files
copied, provenance extended.
"""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.ownership import WRITTEN, hash_files, list_written
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.publication import StagedFolder
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.training.checkpoints import StateDict

_SHARD = "5GB"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def export_model(model: Any, state: StateDict, source: Checkpoint, out: Path, record: JsonObject) -> None:
    """Write `out` atomically, replacing an earlier one.

    Args:
        model: the transformers model, not wrapped.
        state: its whole tensors; the mapping is emptied.
        source: the checkpoint that training began with.
        out: the folder.
        record: the entries that training adds to the provenance.
    """
    assert source.folder is not None
    with StagedFolder(out) as staged:
        model.save_pretrained(staged.path, state_dict=_in_first_type(model, state, source), max_shard_size=_SHARD)
        for path in staged.path.iterdir():
            if not path.name.startswith("model"):
                path.unlink()
        for name in (
            "config.json",
            *source.carried,
        ):  # copied, because transformers 5 writes them in a form that older versions can't read
            if name != PROVENANCE:
                target = staged.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.folder / name, target)
        conversion = earlier_record(source) or {}
        conversion["uptraining_tokens"] = conversion.get("uptraining_tokens", 0) + record["tokens"]
        conversion["uptraining"] = [*conversion.get("uptraining", []), record]
        weights = [path.name for path in staged.path.glob("*.safetensors")]
        conversion["result"] = {"files": hash_files(staged.path, weights)}
        conversion[WRITTEN] = list_written(staged.path, conversion["result"])
        (staged.path / PROVENANCE).write_text(
            json.dumps(conversion, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        for path in staged.path.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                sync(path)
        staged.publish(overwrite=True)


def _in_first_type(model: Any, state: StateDict, source: Checkpoint) -> StateDict:
    """The tensors in the dtype of most of the source's numbers; tensors that are shared in the model stay shared."""
    import torch

    sizes: Counter[str] = Counter()
    for _, _, entry in source.tensors():
        if entry.dtype in _DTYPES:
            sizes[entry.dtype] += entry.nbytes
    dtype = getattr(torch, _DTYPES[sizes.most_common(1)[0][0]])
    first: dict[int, str] = {}
    own = {name: first.setdefault(id(tensor), name) for name, tensor in model.named_parameters(remove_duplicate=False)}
    made: StateDict = {}
    for name in list(state):
        tensor, owner = state.pop(name), own.get(name, name)
        if owner not in made:
            made[owner] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        made[name] = made[owner]
    return made
