"""Exchanging layers between a converted model and its source."""

from typing import Any

import pytest
import torch

from benchmarks.real.where_lost import (
    answer_losses,
    divergences,
    measure,
    of_part,
    repeated,
    restore,
    summary,
)
from gqa_convert.measuring.evaluation.retrieval_texts import make_text
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.tiny import make_config, make_model


def tiny(kv_heads: int, seed: int) -> Any:
    sizes = {"vocab_size": len(demo_tokenizer()), "max_position_embeddings": 600}
    return make_model(make_config("llama", kv_heads=kv_heads, **sizes), seed=seed)


def test_repeated_heads_predict_the_same() -> None:
    merged, source = tiny(4, seed=1), tiny(12, seed=2)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        before = merged(ids).logits
        source.load_state_dict(repeated(merged.state_dict(), source.state_dict(), 16))
        torch.testing.assert_close(source(ids).logits, before, atol=1e-4, rtol=1e-4)


def test_losses_are_those_of_answers_behind_their_prompts() -> None:
    model, tokenizer = tiny(4, seed=1), demo_tokenizer()
    text = make_text(tokenizer, 520, 0)
    for question, loss in zip(text.questions, answer_losses(model, tokenizer, text), strict=True):
        answer = tokenizer(" " + question.answer)["input_ids"]
        ids = torch.tensor([question.prompt + answer])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(question.prompt) - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        assert loss == pytest.approx(float(expected), rel=1e-4)


def test_only_what_differs_changes_losses_when_it_is_exchanged() -> None:
    tokenizer, source, converted = demo_tokenizer(), tiny(4, seed=1), tiny(4, seed=1)
    converted.load_state_dict(of_part(tiny(4, seed=2).state_dict(), 1, "values"), strict=False)
    weights = {
        name: {key: each.clone() for key, each in model.state_dict().items()}
        for name, model in (("source", source), ("converted", converted))
    }
    models = {"converted": (converted, weights["source"]), "source": (source, weights["converted"])}
    results: dict[str, Any] = {}
    text = make_text(tokenizer, 520, 0)
    take = (
        models,
        ["keys", "values"],
        "520",
        lambda model: answer_losses(model, tokenizer, text),
        results,
    )
    steps = measure(*take)
    for _ in range(3):
        next(steps)
    assert len(list(measure(*take))) == 2 * 5 - 3
    found = results["520"]
    own = {name: each["nothing"] for name, each in found.items()}
    assert own["source"] != own["converted"]
    lines = summary(results).splitlines()
    gap = sum(own["converted"]) / 8 - sum(own["source"]) / 8
    assert lines[2].split("|")[3].strip() == f"{gap:.3g}"
    assert lines[3].count("+0 ± 0") == 4
    changes = ["+0", f"{-gap:+.3g}", "+0", f"{gap:+.3g}"]
    assert [cell.split("±")[0].strip() for cell in lines[4].split("|")[3:7]] == changes
    for name, other in (("source", "converted"), ("converted", "source")):
        for part in ("keys 0", "values 0", "keys 1"):
            assert found[name][part] == own[name]
        assert found[name]["values 1"] == own[other]
        for key, each in models[name][0].state_dict().items():
            assert torch.equal(each, weights[name][key])


def test_the_layer_that_differs_is_restored_first() -> None:
    source, converted = tiny(4, seed=1), tiny(4, seed=1)
    converted.load_state_dict(of_part(tiny(4, seed=2).state_dict(), 1, "layer"), strict=False)
    blocks = torch.arange(18).view(2, 9)
    with torch.inference_mode():
        wanted = list(source(blocks).logits.log_softmax(-1))
    alone = {"layer 0": [1.0], "layer 1": [2.0]}
    weights = source.state_dict()
    first, second = restore(
        converted, weights, 2, lambda model: divergences(model, wanted, blocks), alone
    )
    assert (first[0], second[0]) == (1, 0)
    assert first[1] == pytest.approx(0, abs=1e-6)
    assert divergences(converted, wanted, blocks)[0] > 1e-3
