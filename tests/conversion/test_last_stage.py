"""The stage that trains all layers together: what it says of its result is true of the result, and
it is done whole or not at all.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion import resources
from gqa_convert.conversion.layers import last_stage
from gqa_convert.conversion.layers.layer_store import LayerStore
from gqa_convert.conversion.layers.model_loading import open_model
from gqa_convert.conversion.layers.optimizer import batch_order
from gqa_convert.conversion.progress import FitProgress, OnProgress
from tests.helpers import folding_cases as folded
from tests.helpers.checkpoints import digests
from tests.helpers.fitting import Batches, batches_for, divergence, fit, fitted, plan_of
from tests.helpers.native import distance
from tests.helpers.selection import slow_but

pytestmark = pytest.mark.usefixtures("modeling_files_registered")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return folded.build("llama").save(tmp_path / "source")


@pytest.mark.parametrize(
    "name",
    slow_but(
        ("llama", "falcon", "t5"),
        ["llama", "qwen2", "gpt2", "falcon", "bloom", "phi3", "t5", "bart"],
    ),
)
def test_the_result_diverges_as_little_as_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted checkpoint, loaded by itself, on the text that was held out; and it is still
    its own expansion.
    """
    monkeypatch.setattr(last_stage, "RATE", 2e-3)
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    batches = (
        batches_for(case.model, count=1) * 9
    )  # random weights have learned nothing that other text would share
    layers = [*batches_for(case.model)[1:], batches[0]]  # of which the last validates
    _, kl_steps, kl = fitted(
        source, tmp_path / "out", batches=layers, steps=0, fresh=batches, kl_steps=25
    )
    result = case.load(tmp_path / "out")
    assert kl_steps == 25
    assert kl.after < 0.97 * kl.before
    assert divergence(open_model(source), result, [batches[0]]) == pytest.approx(kl.after, rel=2e-3)
    assert distance(case.logits(result), case.logits(folded.placed(case, result, 3))) < folded.EXACT


@pytest.mark.parametrize("tied", [True, False])
def test_where_nothing_is_won_nothing_is_changed(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because nothing was lost, or because steps are far too long."""
    case = folded.build("llama")
    if tied:
        folded.tie(case, 3)
    else:
        monkeypatch.setattr(last_stage, "RATE", 5.0)
    source = case.save(tmp_path / "source")
    fitted(source, tmp_path / "layers", steps=0)
    *_, kl = fitted(source, tmp_path / "whole", steps=0, kl_steps=5)
    assert kl.before == kl.after
    assert (kl.after < 1e-6) is tied
    assert digests(tmp_path / "layers") == digests(tmp_path / "whole")


def test_unasked_it_is_done_where_it_is_worth_its_time_and_possible(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, batches = plan_of(llama), batches_for(open_model(llama))

    def run(name: str, **options: Any) -> Any:
        with LayerStore(tmp_path / name, {}, keep=False) as store:
            return fit(plan, store, batches, batches[:1], steps=2, kl_steps=None, **options)[1:]

    monkeypatch.setattr(last_stage, "WORTHWHILE", 1e-9)
    steps, done = run("worth")
    assert steps == 4
    monkeypatch.setattr(last_stage, "WORTHWHILE", 1e9)
    steps, skipped = run("not")
    assert steps == 0
    assert skipped.after == skipped.before == done.before
    monkeypatch.setattr(last_stage, "WORTHWHILE", 1e-9)
    monkeypatch.setattr(resources, "_MOST_PARAMETERS", 1000)
    assert run("long")[0] == 0


def train(
    student: last_stage.Student,
    store: LayerStore,
    batches: Batches,
    look: OnProgress = lambda _: None,
) -> bool:
    """Six steps; returns whether they helped."""
    before = student.divergence(batches[:1])
    order = batch_order(len(batches), 6, seed=0)
    last_stage.train_together(student, store, batches, order, {"text": "these batches"}, look)
    return student.divergence(batches[:1]) < before


def trained(student: last_stage.Student) -> list[torch.Tensor]:
    return [tensor for layer in student.layers for tensor in layer.named().values()]


def test_killed_it_goes_on_with_what_was_saved(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and no step is taken twice."""
    monkeypatch.setattr(last_stage, "SAVED_EVERY", -1.0)  # after every step
    plan, batches = plan_of(llama), batches_for(open_model(llama))
    seen: list[int] = []

    def stop(progress: FitProgress) -> None:
        seen.append(progress.done)
        if progress.done == 4 and seen.count(4) == 1:
            raise KeyboardInterrupt

    def student(store: LayerStore) -> last_stage.Student:
        return last_stage.Student(plan, store, open_model(llama), nullcontext)

    with LayerStore(tmp_path / "whole", {}, keep=False) as store:
        fit(plan, store, batches, steps=0)
        expected = student(store)
        train(expected, store, batches)
    with LayerStore(tmp_path / "killed", {}, keep=False) as store:
        fit(plan, store, batches, steps=0)
        with pytest.raises(KeyboardInterrupt):
            train(student(store), store, batches, stop)
        found = student(store)
        is_better = train(found, store, batches, stop)
    assert seen == [1, 2, 3, 4, 4, 5, 6], "the state behind the third step was saved"
    assert is_better
    for ours, theirs in zip(trained(found), trained(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_activations_that_are_computed_again_change_no_bit(llama: Path, tmp_path: Path) -> None:
    plan, batches = plan_of(llama), batches_for(open_model(llama))
    kept: list[int] = []
    saved = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda it: it
    )
    found = []
    for recompute in (False, True):
        with LayerStore(tmp_path / str(recompute), {}, keep=False) as store:
            fit(plan, store, batches, steps=0)
            student = last_stage.Student(
                plan, store, open_model(llama), nullcontext, recompute=recompute
            )
            kept.clear()
            with saved:
                is_better = train(student, store, batches)
            assert is_better
            found.append((sum(kept), trained(student)))
    (whole, expected), (least, recomputed) = found
    assert least < whole / 2, "layers keep less for the backward pass"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(recomputed, expected, strict=True))
