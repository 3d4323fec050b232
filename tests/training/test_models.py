"""The models of a run: dropout is off, and the teacher is asked only and speaks of the student's
tokens.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from gqa_convert.errors import RecipeError
from gqa_convert.training.models import load_teacher, set_execution, turn_dropout_off
from gqa_convert.training.opening import check_vocabularies
from gqa_convert.training.trainer import teacher_logits
from tests.helpers.distributed_steps import small_model
from tests.helpers.own_files import make_source_model

IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize(
    ("stored", "device", "dtype"),
    [
        (torch.float32, "cpu", torch.float32),
        (torch.float32, "cuda", torch.bfloat16),
        (torch.float16, "cuda", torch.float16),
    ],
)
def test_the_teacher_is_loaded_to_be_asked_only(
    stored: Any, device: str, dtype: Any, tmp_path: Path
) -> None:
    """In its own type, but for a GPU in bfloat16 instead of float32, whatever the student is
    autocast to.
    """
    small_model("llama").to(stored).save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path, device)
    assert not teacher.training
    assert not any(each.requires_grad for each in teacher.parameters())
    with torch.autocast("cpu", torch.float16):
        logits = teacher_logits(teacher, {"input_ids": IDS})
    assert logits.dtype == dtype
    assert not logits.requires_grad


def execution(**keys: Any) -> Any:
    """The keys of a recipe that say how models compute."""
    return SimpleNamespace(**{"attention": None, "compile": False, **keys})


def test_models_compute_as_the_recipe_says() -> None:
    model = small_model("llama")
    default = model.config._attn_implementation
    set_execution(model, execution(), "cpu")
    assert model.config._attn_implementation == default != "eager"
    set_execution(model, execution(attention="eager"), "cpu")
    assert model.model.layers[1].self_attn.config._attn_implementation == "eager"
    assert model.model.layers[1]._compiled_call_impl is None
    set_execution(model, execution(compile=True), "cpu")
    assert all(layer._compiled_call_impl for layer in model.model.layers)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_that_a_processor_has_not_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"attention is {name}, which a llama can't use here"):
        set_execution(small_model("llama"), execution(attention=name), "cpu")


def checkpoint(folder: Path, tokens: list[str], size: int | None) -> Path:
    """A config and a word-level tokenizer."""
    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordLevel(
            {token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]
        )
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=tokens[0]
    ).save_pretrained(folder)
    stated = {"model_type": "llama"} | ({} if size is None else {"vocab_size": size})
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize(
    ("tokens", "size", "message"),
    [
        (["a", "b", "c"], 8, None),
        (["a", "b", "c", "d"], 4, None),  # padded otherwise
        (["a", "b", "c"], None, None),  # 32,000 by its class
        (["a", "b", "c"], 2, None),  # which text has them is seen when it is there
        (["a", "c", "b"], 8, r"token 1 is 'b' for the student .*2 ids differ"),
        (["a", "b"], 8, "token 2 is 'c' for the student"),
    ],
)
def test_vocabularies(
    tokens: list[str], size: int | None, message: str | None, tmp_path: Path
) -> None:
    student = checkpoint(tmp_path / "student", ["a", "b", "c"], 8)
    teacher = checkpoint(tmp_path / "teacher", tokens, size)
    if message is None:
        check_vocabularies(student, teacher)
    else:
        with pytest.raises(RecipeError, match=message):
            check_vocabularies(student, teacher)


RATES = {
    "t5": ("dropout_rate",),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", RATES)
def test_a_model_in_training_mode_computes_what_it_does_in_evaluation(
    kind: str, implementation: str
) -> None:
    model = make_source_model(kind, **dict.fromkeys(RATES[kind], 0.1))
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 32, (2, 8))
    inputs = {"input_ids": ids} | ({} if kind == "gpt2" else {"decoder_input_ids": ids})
    expected = model.eval()(**inputs).logits
    model.train()
    assert not torch.equal(model(**inputs).logits, expected)
    turn_dropout_off(model)
    assert torch.equal(model(**inputs).logits, expected)


def test_experts_in_training_mode_compute_what_they_do_in_evaluation() -> None:
    """The capacity of two tokens, which holds in training alone, is passed by 32."""
    model = make_source_model(
        "nllb-moe",
        moe_token_dropout=0.5,
        expert_capacity=2,
        encoder_layerdrop=0,
        decoder_layerdrop=0,
    )
    ids = torch.randint(3, 32, (4, 8))
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    expected = model.eval()(**inputs).logits
    turn_dropout_off(model)
    assert torch.equal(model.train()(**inputs).logits, expected)


def test_routers_in_training_mode_add_no_noise() -> None:
    model = make_source_model("switch_transformers", router_jitter_noise=0.5)
    ids = torch.randint(3, 32, (4, 8))
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    expected = model.eval()(**inputs).logits
    turn_dropout_off(model)
    assert torch.equal(model.train()(**inputs).logits, expected)
