"""Runs of encoder-decoders on pairs, against transformers' own losses and against one another."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.errors import RecipeError
from gqa_convert.families.loading import load_model
from gqa_convert.families.table import FAMILIES
from gqa_convert.training.opening import choose_objective
from gqa_convert.training.recipe import make_recipe
from tests.helpers.data_helpers import open_samples, span_tokenizer
from tests.helpers.own_files import SIZES
from tests.helpers.selection import slow_but
from tests.helpers.seq2seq import bart_tokenizer, model, write_pairs
from tests.helpers.uptrain_runs import losses, metrics, run, weights

SEQ2SEQ = sorted(
    kind for kind, sizes in SIZES.items() if "encoder_layers" in sizes or "d_kv" in sizes
)
HEARING = ("speech_to_text", "whisper")
LANGUAGE_CODES = ("mbart", "plbart")
"""Whose decoders begin with the last token of the target: their own tokenizers put the language
there.
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Pairs, and a converted BART beside its source."""
    folder = tmp_path_factory.mktemp("home")
    write_pairs(folder / "pairs.jsonl", 120)
    write_pairs(folder / "held-out.jsonl", 12, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        converted(folder, "bart", bart_tokenizer())
        yield folder


def converted(home: Path, kind: str, tokenizer: Any) -> Path:
    model(home / kind, kind, tokenizer)
    convert_checkpoint(home / kind, home / f"{kind}-gqa", 4, ConversionOptions(method="mean"))
    return home / f"{kind}-gqa"


def pairs(home: Path, name: str = "pairs") -> dict[str, Any]:
    return {"source": str(home / f"{name}.jsonl"), "source_field": "a", "target_field": "b"}


def tokenizer_for(kind: str) -> Any:
    """As the family's own: with sentinels or without."""
    if "d_kv" in SIZES[kind]:
        return span_tokenizer()
    return bart_tokenizer()


@pytest.mark.parametrize(
    "kind",
    slow_but(("bart", "marian", "mbart", "t5"), [kind for kind in SEQ2SEQ if kind not in HEARING]),
)
def test_the_loss_on_pairs_is_that_of_transformers(home: Path, tmp_path: Path, kind: str) -> None:
    """`model(input_ids, attention_mask, labels)`, which shifts the labels by itself; also for the
    converted model's own file.
    """
    folder = home / "bart-gqa" if kind == "bart" else converted(tmp_path, kind, tokenizer_for(kind))
    data = pairs(home)
    run(
        home,
        tmp_path / "run",
        model=str(folder),
        data=data,
        tokens=300,
        tokens_per_step=200,
        micro_batch_size=3,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own, _ = load_model(folder, torch.float32)
    stock = AutoModelForSeq2SeqLM.from_pretrained(folder.parent / kind)
    config = stock.config
    start, last = config.decoder_start_token_id, kind in LANGUAGE_CODES
    samples = open_samples(
        [data],
        tokenizer,
        objective="pairs",
        sequence_length=64,
        decoder_start=start,
        starts_with_last=last,
    )
    count = round(200 / float(samples.tokens_per_sample))
    batch = {name: torch.from_numpy(array) for name, array in samples.batch(range(count)).items()}
    shifted = batch.pop("decoder_input_ids")
    real = batch["labels"] != -100
    with torch.no_grad():
        assert losses(tmp_path / "run")[0] == pytest.approx(
            float(own.eval()(**batch).loss), rel=2e-5
        )
        assert torch.equal(shifted_by_transformers(stock, batch["labels"])[real], shifted[real])


def shifted_by_transformers(model: Any, labels: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        found: torch.Tensor = model.prepare_decoder_input_ids_from_labels(labels)
        return found
    shift = sys.modules[type(model).__module__].shift_tokens_right
    moved: torch.Tensor = shift(
        labels, model.config.pad_token_id, model.config.decoder_start_token_id
    )
    return moved


@pytest.mark.slow
def test_interrupted_and_resumed_is_uninterrupted(home: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "model": str(home / "bart-gqa"),
        "data": pairs(home),
        "evaluate_every": 1,
    }
    keys |= {
        "evaluation_data": pairs(home, "held-out"),
        "evaluation_tokens": 200,
        "warmup_steps": 0,
    }
    keys |= {"teacher": str(home / "bart"), "distillation_weight": 0.5, "schedule": "constant"}
    run(home, tmp_path / "run", **keys, tokens=192)
    summary = run(home, tmp_path / "run", **keys)
    run(home, tmp_path / "whole", **keys)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    lines = metrics(tmp_path / "run")
    assert all("evaluation_loss" in line and "kl" in line for line in lines)
    assert summary["evaluation"]["final"] < summary["evaluation"]["start"]
    assert lines[-1]["tokens"] >= 384 > lines[-2]["tokens"]


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_every_refusal_names_an_objective_that_is_accepted(kind: str, is_converted: bool) -> None:
    family = FAMILIES[kind]
    assert family.modeling is not None
    model_type = family.modeling.model_type if is_converted else kind
    config = {"model_type": model_type, "is_encoder_decoder": True, "max_position_embeddings": 64}
    fields = {"source": "d", "source_field": "a", "target_field": "b"}

    def chosen(objective: str) -> str:
        data: Any = fields if objective == "pairs" else "d"
        keys = {"model": "m", "output": "o", "tokens": "10M", "data": data, "objective": objective}
        return choose_objective(make_recipe(keys), config)

    for objective in ("auto", *OBJECTIVES):
        refusal = ""
        try:
            name = chosen(objective)
            assert objective in (name, "auto")
        except RecipeError as problem:
            refusal = str(problem)
        if refusal:
            named = re.findall(r"(\w+), on ", refusal.split(": ", 1)[1])
            assert named, refusal
            assert [chosen(name) for name in named] == named


def test_a_model_that_hears_is_refused() -> None:
    stated = make_recipe({"model": "m", "output": "o", "tokens": "10M", "data": "d"})
    with pytest.raises(RecipeError, match="m is a model that hears, which is trained by `convert"):
        choose_objective(stated, {"model_type": "whisper", "is_encoder_decoder": True})
