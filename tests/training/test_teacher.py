"""The teacher: how it is loaded, checked against the student, and asked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from gqa_convert.errors import CorruptCheckpointError, OptionError, RecipeError
from gqa_convert.families.table import FAMILIES
from gqa_convert.losses.distillation import kl_loss
from gqa_convert.training.teacher import (
    load_teacher,
    round_teacher,
    rounds_teacher,
    shared_vocabulary,
    teacher_logits,
)

BATCH, LENGTH, VOCAB = 3, 7, 37


def made(dtype: torch.dtype = torch.float64, *, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(BATCH, LENGTH, vocab, generator=generator, dtype=torch.float64)).to(dtype)


def made_labels(vocab: int = VOCAB) -> Tensor:
    labels = torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels[0, 2] = labels[2, 5:] = -100
    return labels


def tiny_llama(kv_heads: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        **options,
    )
    return LlamaForCausalLM(config)


def tiny_t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def t5_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "input_ids": torch.randint(1, VOCAB, (BATCH, 5), generator=generator),
        "decoder_input_ids": torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator),
    }


def test_the_teacher_is_loaded_to_be_asked_only(tmp_path: Path) -> None:
    source = tiny_llama()
    source.save_pretrained(tmp_path)
    batch = {"input_ids": made_labels().abs() % VOCAB, "labels": made_labels()}
    for dtype, expected in (("auto", torch.float32), ("float32", torch.float32), ("bf16", torch.bfloat16)):
        teacher = load_teacher(tmp_path, dtype, "cpu")
        assert not teacher.training
        assert not any(each.requires_grad for each in teacher.parameters())
        with torch.autocast("cpu", torch.float16):
            logits = teacher_logits(teacher, batch)
        assert logits.dtype == expected
        student = made().requires_grad_()
        kl_loss(student, logits, batch["labels"])[0].backward()
        assert student.grad is not None
    with pytest.raises(RecipeError, match="int8"):
        load_teacher(tmp_path, "int8", "cpu")


def test_a_teacher_with_missing_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptCheckpointError, match=r"model\.norm\.weight"):
        load_teacher(tmp_path, "auto", "cpu")


def test_an_encoder_decoder_teacher() -> None:
    teacher, batch = tiny_t5().eval(), t5_batch()
    logits = teacher_logits(teacher, batch | {"labels": made_labels()})
    torch.testing.assert_close(logits, teacher(**batch).logits.detach())
    assert not logits.requires_grad
    with pytest.raises(OptionError, match="decoder_input_ids"):
        teacher_logits(teacher, {"input_ids": batch["input_ids"], "labels": made_labels()})


def checkpoint(folder: Path, tokens: list[str], size: int | None) -> Path:
    """A config and a word-level tokenizer."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=tokens[0]).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama"} | ({} if size is None else {"vocab_size": size}))
    )
    return folder


def folders(root: Path) -> Iterator[Path]:
    number = 0
    while True:
        yield root / str(number)
        number += 1


def test_vocabularies(tmp_path: Path) -> None:
    fresh = folders(tmp_path)
    student = checkpoint(next(fresh), ["a", "b", "c"], 8)
    assert shared_vocabulary(student, student) == 8
    assert shared_vocabulary(student, checkpoint(next(fresh), ["a", "b", "c"], 8)) == 8
    assert shared_vocabulary(student, checkpoint(next(fresh), ["a", "b", "c", "d"], 4)) == 4  # padded otherwise
    bare = checkpoint(next(fresh), ["a"], 3)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert shared_vocabulary(student, bare) == 3
    with pytest.raises(RecipeError, match=r"logits for 2 tokens .* uses 3"):
        shared_vocabulary(student, checkpoint(next(fresh), ["a", "b"], 2))
    with pytest.raises(RecipeError, match=r"token 1 is 'b' .* 'c' for the teacher .*2 ids differ"):
        shared_vocabulary(student, checkpoint(next(fresh), ["a", "c", "b"], 8))
    with pytest.raises(RecipeError, match="nothing"):
        shared_vocabulary(student, checkpoint(next(fresh), ["a", "b"], 8))
    assert shared_vocabulary(student, checkpoint(next(fresh), ["a", "b", "c"], None)) == 8  # 32,000 by its class


def test_every_family_names_its_attention() -> None:
    assert all(family.attention and family.output and (family.fused or family.key) for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("stated", "bytes_each", "device", "rounds"),
    [
        ("auto", 4, "cuda", True),
        ("auto", 2, "cuda", False),
        ("auto", 4, "cpu", False),
        ("float32", 4, "cuda", False),
        ("bf16", 4, "cuda", False),
    ],
)
def test_a_float32_teacher_is_rounded_on_a_gpu(stated: str, bytes_each: int, device: str, rounds: bool) -> None:
    """There float32 products take several times as long. `bf16` is loaded as such."""
    assert rounds_teacher(stated, bytes_each, device) is rounds


def test_what_rounding_the_teacher_costs() -> None:
    teacher = tiny_llama().eval().requires_grad_(False)
    ids = torch.arange(24).view(2, 12) % teacher.config.vocab_size
    exact = teacher(input_ids=ids).logits
    divergence = round_teacher(teacher, {"input_ids": ids}, ids.roll(-1, 1))
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}
    expected = kl_loss(teacher(input_ids=ids).logits, exact, ids)[0] / ids.numel()
    assert divergence == pytest.approx(float(expected), rel=1e-3)
    assert 0 < divergence < 0.05
