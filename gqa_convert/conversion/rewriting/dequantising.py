"""Plans the rewriting of quantised weights in bfloat16; tensors that were never quantised stay as they are."""

from collections.abc import Mapping
from functools import partial

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.quantised import described_quantisation, quantisation_method, without_quantisation
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.rewriting import arrays
from gqa_convert.conversion.rewriting.model import Rewriting, RewrittenTensor
from gqa_convert.errors import UnsupportedFormatError

_SCALES = "_scale_inv"
"""What the name of an FP8 weight's scales ends in behind the weight's name; weights are multiplied by them."""
_LEFT_OUT = (_SCALES, ".input_scale", ".activation_scale", "_scales")
"""Ends of the names of tensors that belong to the quantisation alone."""


def plan_dequantising(checkpoint: Checkpoint) -> Rewriting:
    """Plan how FP8 weights with scales per block or per tensor, or MXFP4 experts, become bfloat16.

    Raises:
        UnsupportedFormatError: quantised weights have no scales that belong to the config.
    """
    method = quantisation_method(checkpoint.config)
    entries = {name: entry for _, name, entry in checkpoint.tensors()}
    block = described_quantisation(checkpoint.config).get("weight_block_size")
    tensors = []
    for number, name, entry in checkpoint.tensors():
        if name.endswith(_LEFT_OUT):
            continue
        if entry.dtype in ("F8_E4M3", "F8_E5M2"):
            sources = (name, f"{name}{_SCALES}")
            own_block = _block_of(checkpoint.source_id, name, entries, block)
            compute = partial(arrays.scale_blocks, block=own_block)
            tensors.append(RewrittenTensor(name, "BF16", entry.shape, number, sources, compute))
        elif method == "mxfp4" and name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            experts, outputs, groups, _ = entry.shape
            shape = (experts, groups * 32, outputs)
            tensors.append(RewrittenTensor(stem, "BF16", shape, number, (name, f"{stem}_scales"), arrays.unpack_fp4))
        else:
            tensors.append(RewrittenTensor(name, entry.dtype, entry.shape, number, (name,)))
    written = size(sum(tensor.nbytes for tensor in tensors))
    return Rewriting(
        source=checkpoint,
        config=without_quantisation(checkpoint.config),
        tensors=tuple(tensors),
        carried=checkpoint.carried,
        notes=(
            f"the weights were quantised ({method}) and are written in bfloat16 ({written}): what {method} lost stays lost",
        ),
    )


def _block_of(
    source_id: str, name: str, entries: Mapping[str, TensorEntry], stated: list[int] | None
) -> tuple[int, int] | None:
    """The rows and columns of a block of an FP8 tensor; None if it has one scale.

    Raises:
        UnsupportedFormatError: its scales do not belong to the config.
    """
    weight, scales = entries[name], entries.get(f"{name}{_SCALES}")
    if scales is None:
        problem = "it has no scales"
    elif scales.elements == 1:
        return None
    elif stated is None or len(weight.shape) < 2:
        problem = f"it has scales {list(scales.shape)} and the config no weight_block_size"
    else:
        down, across = stated
        rows, columns = weight.shape[-2:]
        if scales.shape[-2:] == (-(-rows // down), -(-columns // across)):
            return down, across
        problem = (
            f"its scales {list(scales.shape)} do not belong to blocks of {down} x {across} of {list(weight.shape)}"
        )
    raise UnsupportedFormatError(
        f"{source_id}: the FP8 tensor {name} cannot be dequantised ({problem}): convert the unquantised checkpoint that it was "
        "made from"
    )
