"""Sharded models whose weights one process reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import LaunchError
from gqa_convert.families.loading import load_model
from tests.helpers.ranks import Job
from tests.helpers.tiny import make_checkpoint

TYPES = ("llama", "gemma2", "phi", "mixtral", "starcoder2", "dots1")
"""The last keeps a buffer in float32 whatever it is loaded in."""
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of many kinds: tied or not, tied by their config beside another head, stock or
    with a modelling file of ours, with buffers that no file holds.
    """
    home = tmp_path_factory.mktemp("models")
    made = [make_checkpoint(kind, home / kind, kv_heads=3, dtype=torch.bfloat16) for kind in TYPES]
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=12, n_positions=32)
    ).save_pretrained(home / "gpt2")
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=48, d_kv=6, d_ff=40, num_layers=2, num_heads=12)
    )
    t5.save_pretrained(home / "multihead")
    convert_checkpoint(home / "multihead", home / "t5", 3, ConversionOptions(method="mean"))
    own_heads = [
        with_own_head(home / "t5", home / "own-t5", tie_word_embeddings=False),
        with_own_head(home / "t5", home / "own-untold-t5"),
        with_own_head(home / "gpt2", home / "own-gpt2", tie_word_embeddings=True),
    ]
    return [*made, home / "gpt2", home / "t5", *own_heads]


def with_own_head(source: Path, folder: Path, **config: Any) -> Path:
    """A copy of a tied checkpoint that stores another head beside its embeddings, as T5 1.1
    does.
    """
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(97, 48)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text()) | config
    stated.pop(
        "scale_decoder_outputs", None
    )  # transformers 5 writes it, and no file of T5 1.1 has it
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def load_all(record: str, *folders: str) -> None:
    """On every process: each model in the type it is stored in and in float32, compared with what
    transformers reads.
    """
    from gqa_convert import sharding
    from gqa_convert.processes import join, taking_part

    def refused(*_: Any) -> Any:
        raise AssertionError("another process than the first reads weights")

    with taking_part():
        accelerator = join()
        found: dict[str, Any] = {}
        for folder in map(Path, folders):
            for dtype in (torch.float32, "auto"):
                with pytest.MonkeyPatch.context() as patch:
                    if accelerator.process_index:
                        patch.setattr(sharding, "load_model", refused)
                    model, missing = sharding.load(folder, dtype, by_first=True)
                sharded = sharding.shard(model, accelerator.device, bf16=False)
                expected, _ = load_model(folder, dtype)
                found[f"{folder.name} {dtype}"] = [*missing, *_differences(sharded, expected)]
        Path(f"{record}-{accelerator.process_index}.json").write_text(json.dumps(found))
        shared, _ = load_model(Path(folders[0]), torch.float32)
        shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
        with pytest.raises(
            LaunchError,
            match="is shared with another layer, and FSDP2 would train the two separately",
        ):
            sharding.shard(shared, accelerator.device, bf16=False)


def _differences(sharded: Any, expected: Any) -> list[str]:
    found = []
    pairs = zip(
        sharded.named_parameters(), expected.named_parameters(), strict=True
    )  # a tied parameter is named once
    for (name, shard), (other, whole) in pairs:
        full = shard.full_tensor()
        if (
            name != other
            or full.dtype != whole.dtype
            or not torch.equal(full, whole)
            or shard.to_local().numel() == whole.numel() > 97
        ):
            found.append(name)
    for (name, buffer), (other, whole) in zip(
        sharded.named_buffers(), expected.named_buffers(), strict=True
    ):
        if name != other or not torch.equal(buffer, whole):
            found.append(name)
    ids = torch.arange(2, 20)[None]
    inputs = {"input_ids": ids} | (
        {"decoder_input_ids": ids} if expected.config.is_encoder_decoder else {}
    )
    with torch.no_grad():
        logits = [model.eval()(**inputs).logits for model in (sharded, expected)]
    return found if torch.equal(*logits) else [*found, "logits"]


def test_the_first_process_reads_and_all_have_its_numbers(
    folders: list[Path], tmp_path: Path
) -> None:
    job = Job(load_all, (str(tmp_path / "found"), *map(str, folders)), tmp_path / "logs", 2, **FSDP)
    assert job.wait(120) == [0, 0], job.text()
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert len(found) == 2 * len(folders)
        assert not any(found.values()), found
