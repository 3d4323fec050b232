"""Documents packed into one row, against the same documents alone: logits of every model type, with windows, chunks and
convolutions.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.data.samples import evaluation_blocks
from gqa_convert.errors import RecipeError
from gqa_convert.families.loading import load_model, load_tokenizer
from gqa_convert.families.table import FAMILIES
from gqa_convert.training.documents import check_apart, refuse_mixing
from gqa_convert.training.masks import model_inputs, packed_attention_mask
from gqa_convert.training.teacher import load_teacher, teacher_logits
from tests.helpers import own_files, tiny
from tests.helpers.command_line import run as run_command
from tests.helpers.uptrain_runs import DEMO, losses, recipe, run

LENGTHS = [9, 1, 14, 8]
"""Of the documents in a row: more and less than a window of 4."""
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
FULL = {"layer_types": ["full_attention", "full_attention"]}

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name, family in FAMILIES.items() if family.native
} | {
    "llama4_text, chunks": (
        "llama4_text",
        {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "qwen2, window": ("qwen2", WINDOWED),
    "qwen2_moe, window": ("qwen2_moe", WINDOWED),
    "qwen3, window": ("qwen3", WINDOWED),
    "qwen3_moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    "smollm3, window": (
        "smollm3",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "dots1, window": ("dots1", {"layer_types": ["full_attention", "sliding_attention"]}),
    "mellum, window": ("mellum", {"layer_types": ["full_attention", "sliding_attention"]}),
    "afmoe, both kinds": ("afmoe", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss, windows only": ("gpt_oss", {"layer_types": ["sliding_attention", "sliding_attention"]}),
    "granitemoehybrid, attention only": ("granitemoehybrid", FULL | {"position_embedding_type": "rope"}),
}
"""Model types, and variants with the windows, chunks or layers that the type's tiny config lacks."""

OWN = {
    case: (name, changes)
    for case, (name, changes) in own_files.CASES.items()
    if own_files.auto_class(name) == "AutoModelForCausalLM"
}
OWN = {case: each for case, each in OWN.items() if case != "gpt2, cross-attention"}  # of an encoder-decoder


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stock(case: str) -> nn.Module:
    if case in NATIVE:
        model_type, changes = NATIVE[case]
        return tiny.make_model(tiny.make_config(model_type, kv_heads=3, **changes))
    model_type, changes = OWN[case]
    return own_files.make_source_model(model_type, **changes)


def converted(case: str, folder: Path) -> nn.Module:
    """With 2 K/V heads, in the package's own modelling file."""
    model_type, changes = OWN[case]
    own_files.make_source(model_type, folder / "source", **changes)
    convert_checkpoint(folder / "source", folder / "result", 2, ConversionOptions(method="mean", native=False))
    model, missing = load_model(folder / "result", torch.float32)
    assert not missing
    assert model.config.model_type == f"gqa_{model_type}"
    return model.eval()


def refused(config: dict[str, Any]) -> bool:
    try:
        refuse_mixing("here", config, sum(LENGTHS))
    except RecipeError:
        return True
    return False


def batch_of(lengths: list[int]) -> dict[str, Tensor]:
    """Two rows of documents; the tokenizer's special tokens are left out."""
    ids = torch.randint(3, tiny.VOCAB, (2, sum(lengths)), generator=torch.Generator().manual_seed(3))
    places = torch.cat([torch.arange(length) for length in lengths])
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {"input_ids": ids, "position_ids": places.expand(2, -1), "document_ids": numbers.expand(2, -1)}


@torch.no_grad()
def distance(model: Any, *, lengths: list[int] = LENGTHS, inputs: Callable[..., Any] = model_inputs) -> float:
    """The largest difference between logits of packed documents and of the documents alone, over the spread of the
    latter.
    """
    batch = batch_of(lengths)
    alone = [model(input_ids=part, use_cache=False).logits.float() for part in batch["input_ids"].split(lengths, dim=1)]
    expected = torch.cat(alone, dim=1)
    packed = model(**inputs(model, batch), use_cache=False).logits.float()
    return float((packed - expected).abs().max() / expected.std())


def positions_only(_: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def check(model: Any, config: dict[str, Any]) -> None:
    """Documents are as they are alone, or the model is refused, rightly."""
    if refused(config):
        assert distance(model, inputs=positions_only) > 0.1
        return
    assert distance(model) < 2e-5
    assert distance(model, lengths=[32]) < 2e-5
    check_apart("here", model)


@pytest.mark.parametrize("case", [*NATIVE, *OWN])
def test_packed_documents_are_as_they_are_alone(case: str) -> None:
    model = stock(case)
    check(model, model.config.to_dict())


@pytest.mark.parametrize("case", sorted(OWN.keys() - {"falcon, 7B"}))  # which has one K/V head already
def test_so_they_are_in_modelling_files(case: str, tmp_path: Path) -> None:
    model = converted(case, tmp_path)
    check(model, json.loads((tmp_path / "result" / "config.json").read_bytes()))


def test_which_types_are_refused() -> None:
    """Recurrences, convolutions, ALiBi that is made of a mask of padding, and decoders that take no positions."""
    found = {name for name in FAMILIES if refused({"model_type": name})}
    assert {name.removeprefix("gqa_").replace("-", "_") for name in found} == {
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "recurrent_gemma",
        "zamba",
        "zamba2",
        "bloom",
        "bart",
        "mbart",
        "pegasus",
        "blenderbot",
        "blenderbot_small",
        "m2m_100",
        "marian",
        "plbart",
    }
    with pytest.raises(RecipeError, match="ALiBi"):
        refuse_mixing("here", {"model_type": "falcon", "alibi": True}, 32)


@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_long_rope_takes_the_frequencies_of_the_longest_document(model_type: str, tmp_path: Path) -> None:
    """Of 14 tokens here. Below the length that was trained first, nothing is chosen."""
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 10}
    pairs, beside = {"phi3": (4, {"original_max_position_embeddings": 10}), "llama": (8, {})}[model_type]
    factors = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    model = tiny.make_model(tiny.make_config(model_type, kv_heads=3, rope_parameters=rotary | factors, **beside))
    assert distance(model) > 0.1
    assert distance(model, lengths=[4, 6]) < 2e-5
    model.config.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_bytes())
    older = {"model_type": "phi3", "original_max_position_embeddings": 10, "rope_scaling": {"type": "su", **factors}}
    for config in (stated, older):
        refuse_mixing("here", config, 10)
        with pytest.raises(RecipeError, match=r"longrope.* lower sequence_length to 10, or remove document_mask"):
            refuse_mixing("here", config, 11)


@pytest.mark.parametrize(
    "model_type", ["bart", "mbart", "plbart", "pegasus", "blenderbot", "blenderbot-small", "marian"]
)
def test_decoders_without_positions_would_mix(model_type: str) -> None:
    config = tiny.CONFIG_MAPPING[model_type](
        **(own_files.SIZES[model_type] | {"is_encoder_decoder": False, "is_decoder": True})
    )
    assert distance(tiny.make_model(config)) > 0.1


@pytest.mark.parametrize("case", ["mistral", "gemma2", "gpt_oss", "opt", "mpt", "falcon", "gpt_neo"])
def test_a_teacher_in_bfloat16(case: str, tmp_path: Path) -> None:
    """Within rounding, as when the document's tokens are alone."""
    stock(case).to(torch.bfloat16).save_pretrained(tmp_path)
    teacher, batch = load_teacher(tmp_path, "auto", "cpu"), batch_of(LENGTHS)
    logits = teacher_logits(teacher, model_inputs(teacher, batch)).float()
    expected = torch.cat(
        [teacher(input_ids=part, use_cache=False).logits for part in batch["input_ids"].split(LENGTHS, 1)], 1
    ).float()
    assert (logits - expected).abs().max() < 0.1 * expected.std()
    assert logits.dtype != teacher.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["mistral", "gpt_oss", "gemma2"])
def test_a_plain_mask_would_not_do(case: str) -> None:
    """It drops windows; eager attention adds its booleans to the scores. So the tests above can fail."""

    def plain(_: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = dict(batch)
        return inputs | {"attention_mask": packed_attention_mask(inputs.pop("document_ids"))}

    assert distance(stock(case), inputs=plain) > 0.1


def test_windows_count_the_query_itself() -> None:
    mask = packed_attention_mask(torch.tensor([[0, 0, 0, 0, 1]]), 2)[0, 0].int()
    assert mask.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_what_a_model_computes_counts() -> None:
    """A type without a record is asked by example; a model is left in the mode that it was in."""
    model = stock("jamba").train()
    with pytest.raises(
        RecipeError, match=r"one document changes what there \(jamba\) computes for another in the same row"
    ):
        check_apart("there", model)
    assert model.training
    model = stock("bloom")
    with pytest.raises(RecipeError, match=r"one document changes what there \(bloom\) computes"):
        check_apart("there", model)
    check_apart("there", stock("mixtral").to(torch.bfloat16))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints with the demo's tokenizer; long text and short documents."""
    folder = tmp_path_factory.mktemp("home")
    tokenizer = load_tokenizer(DEMO)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    for name in ("mistral", "gemma2", "jamba"):
        tiny.make_model(tiny.make_config(name, kv_heads=3, **sizes)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    own_files.make_source("bloom", folder / "bloom", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "bloom")
    (folder / "long.txt").write_text("def count(number): return number + 1\n" * 200)
    documents = [f"def f{number}(x):\n    return {'x + ' * (number % 7)}{number}\n" for number in range(60)]
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


def test_one_document_trains_as_without_the_mask(home: Path, tmp_path: Path) -> None:
    """In all of a run, since there is a single end of a document in the text and sampling passes it by."""
    keys = {"model": str(home / "mistral"), "data": str(home / "long.txt"), "tokens": 128}
    run(home, tmp_path / "with", document_mask=True, **keys)
    run(home, tmp_path / "without", **keys)
    assert losses(tmp_path / "with") == pytest.approx(losses(tmp_path / "without"), rel=1e-5)


def test_a_teacher_with_eager_attention_agrees_with_itself(home: Path, tmp_path: Path) -> None:
    (tmp_path / "teacher").symlink_to(home / "gemma2")
    keys = {
        "model": str(home / "gemma2"),
        "data": str(home / "short.jsonl"),
        "tokens": 64,
        "teacher": str(tmp_path / "teacher"),
    }
    run(home, tmp_path / "run", document_mask=True, teacher_dtype="float32", **keys)
    assert losses(tmp_path / "run") == [pytest.approx(0, abs=1e-6)]


def test_evaluation_keeps_documents_apart(home: Path, tmp_path: Path) -> None:
    """The loss at the start is that of each document by itself."""
    keys = {"model": str(home / "mistral"), "data": str(home / "short.jsonl"), "tokens": 64, "document_mask": True}
    summary = run(home, tmp_path / "run", evaluation_data=str(home / "short.jsonl"), evaluation_tokens=300, **keys)
    tokenizer = load_tokenizer(home / "mistral")
    blocks = evaluation_blocks(
        [str(home / "short.jsonl")], tokenizer, objective="causal", sequence_length=32, tokens=300, document_mask=True
    )
    model, _ = load_model(home / "mistral", torch.float32)
    total, count = 0.0, 0
    for number in range(len(blocks)):
        ids, labels = (torch.from_numpy(blocks.batch([number])[name][0]) for name in ("input_ids", "labels"))
        ends = [0, *((ids == tokenizer.eos_token_id).nonzero().flatten() + 1).tolist(), len(ids)]
        for start, end in pairwise(ends):
            if (labels[start:end] == -100).all():
                continue
            with torch.no_grad():
                logits = model(input_ids=ids[None, start:end], use_cache=False).logits[0]
            total += float(cross_entropy(logits, labels[start:end], reduction="sum"))
            count += int((labels[start:end] != -100).sum())
    assert count > 200
    assert summary["evaluation"]["start"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        (
            "jamba",
            None,
            "jamba is of model type jamba, and document_mask is impossible because its recurrences or convolutions",
        ),
        ("mistral", "jamba", "jamba is of model type jamba, and document_mask is impossible because its recurrences"),
        (
            "bloom",
            None,
            "bloom is of model type bloom, and document_mask is impossible because transformers computes its ALiBi",
        ),
    ],
)
def test_a_run_refuses(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, student: str, teacher: str | None, message: str
) -> None:
    """Before anything is tokenised."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = {"model": str(home / student), "data": str(home / "long.txt"), "document_mask": True}
    with pytest.raises(RecipeError, match=message):
        run(home, tmp_path / "run", **keys, **({} if teacher is None else {"teacher": str(home / teacher)}))
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_the_command_refuses_in_one_line(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run", model=str(home / "jamba"), data=str(home / "long.txt"), document_mask=True)
    result = run_command("uptrain", path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "document_mask is impossible" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_run_refuses_what_no_record_tells(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, by what the model computes."""
    monkeypatch.delitem(FAMILIES, "jamba")
    keys = {"data": str(home / "long.txt"), "document_mask": True, "trainable": "all"}
    with pytest.raises(RecipeError, match=r"one document changes what .*jamba \(jamba\) computes"):
        run(home, tmp_path / "run", model=str(home / "mistral"), teacher=str(home / "jamba"), **keys)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_encoder_decoders_are_refused(home: Path, tmp_path: Path) -> None:
    own_files.make_source("t5", tmp_path / "t5", vocab_size=len(load_tokenizer(DEMO)))
    load_tokenizer(DEMO).save_pretrained(tmp_path / "t5")
    with pytest.raises(
        RecipeError,
        match=r"document_mask needs a decoder-only model, and .*t5 is an encoder-decoder: remove document_mask",
    ):
        run(home, tmp_path / "run", model=str(tmp_path / "t5"), data=str(home / "long.txt"), document_mask=True)


def test_a_batch_without_documents_is_left_as_it_is() -> None:
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
    assert model_inputs(None, batch) == batch
