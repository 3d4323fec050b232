"""Sources with quantised weights, as they lie on the Hub."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.tiny import make_config, make_model
from tests.helpers.verification import edit_json

BLOCK = 32
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def fp8_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in FP8 and its scales, one for each block, as DeepSeek and Qwen store them."""
    rows, columns = matrix.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return stored.to(torch.float8_e4m3fn).contiguous(), scale


def write_fp8(folder: Path) -> Path:
    """A Qwen3 in FP8 with scales per block, as Qwen/Qwen3-8B-FP8 is, and one tensor in float32."""
    make_model(make_config("qwen3", head_dim=8)).save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            tensors[name] = tensor if name == "model.norm.weight" else tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=FP8, torch_dtype="bfloat16", own_key=1)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Two numbers of four bits in a byte, and one power of two for each 32 numbers, as openai/gpt-oss-20b has them.

    Returns:
        The tensors that were packed, by name.
    """
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    expected = {}
    make_model(make_config("gpt_oss", intermediate_size=64)).bfloat16().save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
        scaled = pairs * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = scaled.reshape(experts, outputs, inputs).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return expected
