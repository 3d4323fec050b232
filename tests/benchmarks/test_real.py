"""The pure parts of the benchmark on a real model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.real.conversions import Job
from benchmarks.real.report import MISSING, blocks
from benchmarks.real.scores import Reference, position_bins, score


@pytest.mark.parametrize("window", [64, 512, 2048])
def test_bins_cover_every_predicting_position_once(window: int) -> None:
    covered = [position for first, last in position_bins(window) for position in range(first, last + 1)]
    assert covered == list(range(window - 1))


class Bigram(torch.nn.Module):
    """Predicts from the token alone; has the parts of a transformers model that scoring uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(32, 32, generator=generator)
        self.config = SimpleNamespace(vocab_size=32)

    def base_model(self, input_ids: torch.Tensor, **options: Any) -> Any:  # noqa: ARG002
        return SimpleNamespace(last_hidden_state=self.table[input_ids])

    def get_output_embeddings(self) -> Any:
        return torch.nn.Identity()


def test_scores_compare_with_the_source(tmp_path: Path) -> None:
    blocks = torch.randint(0, 32, (3, 700), generator=torch.Generator().manual_seed(0))
    source, other = Bigram(1), Bigram(2)
    reference = Reference(tmp_path / "source.npy", lambda: source, blocks)
    again = Reference(tmp_path / "source.npy", lambda: pytest.fail("the file is there"), blocks)
    own = score(None, again, blocks)
    assert (own.kl, own.excess, own.tokens) == (0.0, 0.0, 3 * 699)
    assert score(source, reference, blocks).kl == pytest.approx(0.0, abs=1e-3)
    found = score(other, reference, blocks)
    log_p, log_q = source.table.log_softmax(-1)[blocks[:, :-1]], other.table.log_softmax(-1)[blocks[:, :-1]]
    assert found.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), abs=2e-3)
    loss = torch.nn.functional.cross_entropy(other.table[blocks[:, :-1]].flatten(0, 1), blocks[:, 1:].flatten())
    assert found.loss == pytest.approx(float(loss), abs=1e-3)
    assert found.excess == pytest.approx(found.loss - own.loss, abs=1e-3)
    assert found.loss_error is not None
    assert found.by_position[-1].last == 698


def loss(value: float, kl: float) -> dict[str, Any]:
    errors = {"loss_error": 0.1, "excess_error": 0.01, "kl_error": 0.02}
    position = [{"first": 0, "last": 63, "loss": value, "kl": kl}]
    return {"tokens": 511, "loss": value, "excess": kl, "kl": kl, "by_position": position} | errors


def test_the_report_has_a_row_for_each_method() -> None:
    found = {
        "512": {"questions": 8, "found": 0.8, "found_error": 0.1, "by_kind": {"needles": 0.6, "copying": 0.8}},
        "1024": {"questions": 8, "found": 0.6, "found_error": 0.1, "by_kind": {"needles": 0.4, "copying": 0.6}},
    }
    scores = {"loss": {"prose": {"512": loss(3.0, 0.0)}, "chat": {"512": None}}, "retrieval": found}
    fit = Job("smollm2", 1, "fit", "mixed", None, 0)._asdict()
    measured = {
        "minutes": 9.0,
        "core_minutes": 8.0,
        "tokens_read": 102_400,
        "calibration_kl": {"before": 0.5, "after": 0.25, "curve": [[50, 0.4], [100, 0.3]]},
        "loss": {"prose": {"512": loss(3.2, 0.2)}},
        "retrieval": found,
    }
    mean = Job("smollm2", 1, "mean", None, None, None)._asdict() | {
        "minutes": 0.1,
        "loss": {"prose": {"512": loss(6.0, 3.0)}},
    }
    data = {
        "commands": [["python", "-m", "benchmarks.real"]],
        "models": {"smollm2": {"scores": scores}},
        "cells": [mean, fit | measured, fit | measured | {"seed": 1, "loss": {"prose": {"512": loss(3.4, 0.4)}}}],
    }
    made = blocks(data)
    (row,) = [line for line in made["results"].splitlines() if "| fit |" in line]
    assert "3.000 -> 3.300, 90.0%" in row
    assert "70% -> 70%" in row
    assert made["needles"].splitlines()[0] == "| method | 512 tokens | 1,024 tokens | needles | copying |"
    assert made["needles"].splitlines()[2:] == ["| source | 80% | 60% | 50% | 70% |", "| fit | 80% | 60% | 50% | 70% |"]
    earlier = {"needle": {"512": {"needles": 5, "found": 0.8, "by_depth": [1.0, 0.9, 0.8, 0.7, 0.6]}}}
    table = blocks(data | {"models": {"smollm2": {"scores": earlier}}, "cells": []})["needles"].splitlines()
    assert table[0] == "| method | 512 tokens | depth 5% | depth 25% | depth 50% | depth 75% | depth 95% |"
    assert table[2] == "| source | 80% | 100% | 90% | 80% | 70% | 60% |"
    nothing = blocks({"commands": [], "models": {}, "cells": []})
    assert MISSING in nothing["results"]
