"""Exports the trained model as an ordinary checkpoint: weights in the dtype of the initial
checkpoint, other files copied, provenance extended.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gqa_convert.checkpoint.dtypes import STORED
from gqa_convert.checkpoint.headers import ITEM_BYTES
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.families.loading import load_model
from gqa_convert.processes import rank, together
from gqa_convert.publishing.atomic_files import sync, write_json
from gqa_convert.publishing.ownership import WRITTEN, list_written
from gqa_convert.publishing.publication import staged_folder
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.sharding import whole

from .checkpoints import StateDict


def export_model(
    model: Any, state: StateDict | None, source: Checkpoint, out: Path, record: JsonObject
) -> None:
    """Write `out` atomically, replacing an earlier one.

    Args:
        model: the transformers model, not wrapped.
        state: its whole tensors, which the mapping loses; None for those that the model holds.
        source: the checkpoint that training began with.
        out: the folder.
        record: the summary of the run, which is added to the provenance.
    """
    tensors = _in_source_dtypes(model, state or model.state_dict(), source)
    with staged_folder(out) as staged:
        folder = staged.path
        model.save_pretrained(folder, state_dict=tensors, max_shard_size="5GB")
        for path in folder.iterdir():
            if not path.name.startswith("model"):
                path.unlink()
        # copied, because transformers 5 writes them in a form that older versions can't read
        for name in ("config.json", *source.carried):
            if name != PROVENANCE:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.local_folder / name, target)
        conversion = earlier_record(source) or {}
        conversion["uptraining_tokens"] = conversion.get("uptraining_tokens", 0) + record["tokens"]
        conversion["uptraining"] = [*conversion.get("uptraining", []), record]
        conversion[WRITTEN] = list_written(folder, hash_weights=True)
        write_json(folder / PROVENANCE, conversion)
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                sync(path)
        staged.publish(overwrite=True)


def _in_source_dtypes(model: Any, state: StateDict, source: Checkpoint) -> StateDict:
    """The tensors in the source's dtypes, those of other names in that of its largest one; tensors
    that are shared in the model are there once.
    """
    entries = {name: entry for name, entry in source.entries.items() if entry.dtype in ITEM_BYTES}
    largest = max(entries.values(), key=lambda entry: entry.nbytes)
    repeated = dict(model.named_parameters(remove_duplicate=False))
    for name, _ in model.named_parameters():
        del repeated[name]
    made = {}
    for name in list(state):
        tensor = state.pop(name)
        if name in repeated:
            continue
        if tensor.is_floating_point():
            stored = entries.get(name, largest).dtype
            tensor = tensor.to(getattr(torch, STORED[stored].name))
        made[name] = tensor
    return made


def merged_model(trained: nn.Module, folder: Path) -> Any:
    """The checkpoint's model on the CPU, with the adapters' products added to its weights; None on
    all processes but the first. Every process calls this.

    They are added to the weights of the checkpoint itself, not to those that were rounded to
    bfloat16 or 4 bits for training.

    Args:
        trained: the model with adapters, of which each process may hold shards.
        folder: the checkpoint that training began with.
    """
    with together():
        model = None if rank() else load_model(folder, "auto")[0]
    for name, module in trained.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        down, up = (
            whole(each["default"].weight.detach()).to("cpu", torch.float32)
            for each in (module.lora_A, module.lora_B)
        )
        if model is not None:
            product = module.scaling["default"] * (up @ down)
            weight = model.get_submodule(name).weight.data
            weight.copy_(weight.float() + (product.T if module.fan_in_fan_out else product))
    return model
