"""Plans the rewriting of quantised weights in bfloat16; tensors that were never quantised stay as they are."""

from functools import partial

from gqa_convert.checkpoint.quantised import described_quantisation, quantisation_method, without_quantisation
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.rewriting import arrays
from gqa_convert.conversion.rewriting.recipes import OtherForm
from gqa_convert.errors import UnsupportedFormatError

_SCALES = "_scale_inv"
"""What the name of an FP8 weight's scales ends in behind the weight's name; weights are multiplied by them."""
_LEFT_OUT = (_SCALES, ".input_scale", ".activation_scale", "_scales")
"""Ends of the names of tensors that belong to the quantisation alone."""


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """A source whose FP8 weights with scales per block or per tensor, or MXFP4 experts, are in bfloat16.

    Raises:
        UnsupportedFormatError: quantised weights have no scales that belong to the config.
    """
    method, form = quantisation_method(checkpoint.config), OtherForm(checkpoint)
    for number, name, entry in checkpoint.tensors():
        if name.endswith(_LEFT_OUT):
            continue
        if entry.dtype in ("F8_E4M3", "F8_E5M2"):
            compute = partial(arrays.scale_blocks, block=_block_of(checkpoint, name))
            form.add(name, "BF16", entry.shape, number, (name, f"{name}{_SCALES}"), compute)
        elif method == "mxfp4" and name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            experts, outputs, blocks, _ = entry.shape
            shape = experts, blocks * 32, outputs
            form.add(stem, "BF16", shape, number, (name, f"{stem}_scales"), arrays.unpack_fp4)
        else:
            form.add(name, entry.dtype, entry.shape, number, (name,))
    lost = f"the weights were quantised ({method}) and become bfloat16: what {method} lost stays lost"
    return form.checkpoint(without_quantisation(checkpoint.config), (lost,))


def _block_of(checkpoint: Checkpoint, name: str) -> tuple[int, int] | None:
    """The rows and columns of a block of an FP8 tensor; None if it has one scale.

    Raises:
        UnsupportedFormatError: its scales do not belong to the config.
    """
    weight, scales = checkpoint.entries[name], checkpoint.entries.get(f"{name}{_SCALES}")
    block = described_quantisation(checkpoint.config).get("weight_block_size")
    if scales is not None and scales.elements == 1:
        return None
    if scales is not None and block is not None and len(weight.shape) > 1:
        rows, columns = weight.shape[-2:]
        if scales.shape[-2:] == (-(-rows // block[0]), -(-columns // block[1])):
            return block[0], block[1]
    found = "no scales" if scales is None else f"scales {list(scales.shape)}"
    raise UnsupportedFormatError(
        f"{checkpoint.source_id}: the FP8 tensor {name} {list(weight.shape)} cannot be dequantised, since it has {found} and "
        f"the config weight_block_size = {block}: convert the unquantised checkpoint that it was made from"
    )
