"""Losses against the plain formulas in float64, and the teacher."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from gqa_convert.errors import CorruptCheckpointError, OptionError, RecipeError
from gqa_convert.families.table import FAMILIES
from gqa_convert.text import loss_terms, losses
from gqa_convert.text.losses import combined_loss, kl_loss, lm_loss
from gqa_convert.training.teacher import (
    load_teacher,
    round_teacher,
    rounds_teacher,
    shared_vocabulary,
    teacher_logits,
)

BATCH, LENGTH, VOCAB = 3, 7, 37


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four rows, the last one smaller."""
    for module in (loss_terms, losses):
        monkeypatch.setattr(module, "rows_at_once", lambda logits: 4)


def made(dtype: torch.dtype = torch.float64, *, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(BATCH, LENGTH, vocab, generator=generator, dtype=torch.float64)).to(dtype)


def made_labels(vocab: int = VOCAB) -> Tensor:
    labels = torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels[0, 2] = labels[2, 5:] = -100
    return labels


def plain_lm(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def plain_kl(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    p, log_q = teacher.softmax(-1), student.log_softmax(-1)
    return (p * (p.log() - log_q)).sum(-1)[labels != -100].sum()


def value_and_gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    value = loss(logits * 1.0)  # not a leaf, as the logits of a model
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def assert_same(ours: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    torch.testing.assert_close(
        value_and_gradient(ours, logits), value_and_gradient(plain, logits), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_lm_loss_is_cross_entropy(overwrite: bool) -> None:
    labels = made_labels()
    assert_same(lambda x: 3.7 * lm_loss(x, labels, overwrite=overwrite)[0], lambda x: 3.7 * plain_lm(x, labels), made())
    assert lm_loss(made(), labels)[1] == (labels != -100).sum()


@pytest.mark.parametrize("overwrite", [False, True])
def test_kl_loss_is_the_plain_formula(overwrite: bool) -> None:
    labels, teacher = made_labels(), made(seed=2)
    assert_same(
        lambda x: kl_loss(x, teacher, labels, overwrite=overwrite)[0], lambda x: plain_kl(x, teacher, labels), made()
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_z_loss_is_the_squared_logarithm_of_the_normaliser(weight: float, overwrite: bool) -> None:
    """As in T5's pretraining (mesh-tensorflow's `z_loss`), where the weight was 1e-4."""
    labels, teacher = made_labels(), made(vocab=VOCAB - 4, seed=2)

    def plain(logits: Tensor) -> Tensor:
        z = logits.logsumexp(-1).square()[labels != -100].sum()
        kl = plain_kl(logits[..., : VOCAB - 4], teacher, labels)
        return (1 - weight) * plain_lm(logits, labels) + weight * kl + 0.02 * z

    def ours(logits: Tensor) -> Tensor:
        return combined_loss(logits, labels, teacher, weight=weight, z_loss=0.02, overwrite=overwrite).sum

    assert_same(ours, plain, made())


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_combined_loss_weighs_its_parts(weight: float) -> None:
    labels, teacher = made_labels(), made(seed=2)

    def plain(logits: Tensor) -> Tensor:
        return (1 - weight) * plain_lm(logits, labels) + weight * plain_kl(logits, teacher, labels)

    assert_same(lambda x: combined_loss(x, labels, teacher, weight=weight).sum, plain, made())
    loss = combined_loss(made(), labels, teacher, weight=weight)
    assert (loss.lm is None) == (weight == 1.0)
    assert (loss.kl is None) == (weight == 0.0)
    if loss.lm is not None:
        torch.testing.assert_close(loss.lm, plain_lm(made(), labels))
    if loss.kl is not None:
        torch.testing.assert_close(loss.kl, plain_kl(made(), teacher, labels))


def test_gradcheck() -> None:
    labels, teacher = made_labels(9), made(vocab=9, seed=2)
    logits = made(vocab=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: lm_loss(x, labels)[0], logits)
    assert torch.autograd.gradcheck(lambda x: combined_loss(x, labels, teacher, weight=0.7).sum, logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(dtype: torch.dtype) -> None:
    logits, labels = made(dtype), made_labels()
    value, gradient = value_and_gradient(lambda x: kl_loss(x, logits, labels)[0], logits)
    assert abs(value) < 1e-5
    assert gradient.abs().max() < 1e-6


def test_padded_vocabularies_are_compared_where_both_have_tokens() -> None:
    labels, teacher = made_labels(), made(vocab=VOCAB + 3, seed=2)
    same = kl_loss(made(), teacher[..., :VOCAB], labels)[0]
    torch.testing.assert_close(kl_loss(made(), teacher, labels)[0], same)
    wide = made(vocab=VOCAB + 3)

    def ours(logits: Tensor) -> Tensor:
        return combined_loss(logits, labels, made(seed=2), weight=0.4, overwrite=True).sum

    def plain(logits: Tensor) -> Tensor:
        part, target = logits[..., :VOCAB], made(seed=2)
        return 0.6 * plain_lm(logits, labels) + 0.4 * plain_kl(part, target, labels)

    assert_same(ours, plain, wide)


def test_tokens_without_probability() -> None:
    student, teacher, labels = made(), made(seed=2), made_labels(VOCAB - 4)
    for logits in (student, teacher):
        logits[..., -4:] = -torch.inf
    value, gradient = value_and_gradient(lambda x: combined_loss(x, labels, teacher, weight=0.5).sum, student)
    short, target = student[..., :-4], teacher[..., :-4]
    torch.testing.assert_close(value, combined_loss(short, labels, target, weight=0.5).sum)
    assert gradient.isfinite().all()


def test_no_labels_no_loss() -> None:
    labels = torch.full((BATCH, LENGTH), -100)
    logits = made().requires_grad_()
    loss = combined_loss(logits, labels, made(seed=2), weight=0.5)
    loss.sum.backward()
    assert (float(loss.sum.detach()), float(loss.count)) == (0.0, 0.0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_half_precision_is_summed_in_float32() -> None:
    labels, teacher = made_labels(), made(torch.bfloat16, seed=2, scale=4.0)
    logits = made(torch.bfloat16, scale=4.0)
    for options in (
        {},
        {"teacher": teacher, "weight": 1.0},
        {"teacher": teacher, "weight": 0.5},
    ):
        exact = {key: value.double() if isinstance(value, Tensor) else value for key, value in options.items()}
        loss = combined_loss(logits, labels, **options)
        assert loss.sum.dtype == loss.count.dtype == torch.float32
        torch.testing.assert_close(
            loss.sum.double(), combined_loss(logits.double(), labels, **exact).sum, rtol=2e-6, atol=1e-6
        )
        _, gradient = value_and_gradient(lambda x: 0.013 * combined_loss(x, labels, **options).sum, logits)  # noqa: B023
        _, expected = value_and_gradient(lambda x: 0.013 * combined_loss(x, labels, **exact).sum, logits.double())  # noqa: B023
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), expected, rtol=2**-7, atol=1e-8)


def test_overwriting() -> None:
    labels, logits = made_labels(), made().requires_grad_()
    hidden = logits * 1.0
    loss = lm_loss(hidden, labels, overwrite=True)[0]
    assert not torch.equal(hidden, logits)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    hidden = torch.tanh(logits)  # whose gradient needs its result: torch notices
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lm_loss(hidden, labels, overwrite=True)[0].backward()
    kept = made()
    lm_loss(kept, labels, overwrite=True)
    with torch.no_grad():
        lm_loss(kept.requires_grad_(), labels, overwrite=True)
    assert torch.equal(kept, made())  # nothing to learn: nothing is overwritten


def test_logits_that_are_views() -> None:
    labels = made_labels()
    assert_same(lambda x: lm_loss(x[:, 1:], labels[:, 1:])[0], lambda x: plain_lm(x[:, 1:], labels[:, 1:]), made())
    assert_same(lambda x: lm_loss(x.transpose(0, 1), labels.T)[0], lambda x: plain_lm(x, labels), made())


def test_the_teacher_gets_no_gradient() -> None:
    teacher = made(seed=2).requires_grad_()
    kl_loss(made().requires_grad_(), teacher, made_labels())[0].backward()
    assert teacher.grad is None


def test_senseless_options() -> None:
    logits, labels = made(), made_labels()
    for call in (
        lambda: combined_loss(logits, labels, weight=0.5),
        lambda: combined_loss(logits, labels, logits, weight=1.5),
        lambda: lm_loss(logits, labels[:, 1:]),
        lambda: kl_loss(logits, logits[:1], labels),
    ):
        with pytest.raises(OptionError):
            call()


_MEMORY = """
import sys, torch
from gqa_convert.text.losses import combined_loss
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
rows, vocab = 2048 // dtype.itemsize, 32000  # 65 MB: malloc keeps freed blocks of up to 32 MiB, and then the peak is a matter of luck
labels = torch.randint(vocab, (1, rows))
peak = lambda: 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss starts at the parent's
def logits():
    return torch.empty(1, rows, vocab, dtype=dtype).normal_()
teacher = logits()
def ours(overwrite):
    x = logits().requires_grad_()
    combined_loss(x * 1, labels, teacher, weight=0.5, overwrite=overwrite).sum.backward()
def naive():
    x = logits().requires_grad_()
    y = (x * 1).float()
    loss = torch.nn.functional.cross_entropy(y[0], labels[0], reduction="sum")
    p = teacher.float().log_softmax(-1)
    (loss + torch.nn.functional.kl_div(y.log_softmax(-1), p, log_target=True, reduction="sum")).backward()
x = logits().requires_grad_()
y = x * 1
del x, y
unit, before, found = rows * vocab * dtype.itemsize, peak(), []
for run in (lambda: ours(True), lambda: ours(False), naive):
    run()
    found.append((peak() - before) / unit)
print(*found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read where Linux has it")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory(dtype: str) -> None:
    """In units of the logits' size, beyond the logits and the tensor that they are made of, whose gradient is one
    more.
    """
    result = subprocess.run([sys.executable, "-c", _MEMORY, dtype], capture_output=True, text=True, check=True)
    overwriting, allocating, naive = map(float, result.stdout.split())
    assert overwriting < 1.6
    assert allocating < 1.8
    assert naive > 3 * allocating


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


def test_as_transformers_computes_it() -> None:
    model, ids, labels = tiny_llama(), made_labels().abs() % VOCAB, made_labels()
    shifted = torch.cat((labels[:, 1:], torch.full((BATCH, 1), -100)), 1)
    expected = model(input_ids=ids, labels=labels).loss
    total, count = lm_loss(model(input_ids=ids).logits, shifted)
    torch.testing.assert_close(total / count, expected)

    model, batch = tiny_t5(), t5_batch()
    expected = model(**batch, labels=labels).loss
    total, count = lm_loss(model(**batch).logits, labels)
    torch.testing.assert_close(total / count, expected)
    expected.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    (total / count).backward()
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=1e-4, atol=1e-6)


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
