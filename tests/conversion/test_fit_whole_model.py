"""The stage that trains all layers together: what it says of its result is true of the result, and it is done whole or
not at all.
"""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit import limits, whole_model
from gqa_convert.conversion.fit.layer_walk import fit_checkpoint, fit_layers
from gqa_convert.conversion.fit.lockstep import open_model
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.records import TrainingProgress
from gqa_convert.conversion.fit.relative_adam import RelativeAdam
from gqa_convert.conversion.fit.source_layer import attention_of
from gqa_convert.conversion.fit.whole_model import affordable, check_possible, rank_for, train_together
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OptionError
from gqa_convert.merging.attention_heads import LayerLayout, Tensors
from tests.helpers import folding_cases as folded
from tests.helpers.checkpoints import digests
from tests.helpers.command_line import run
from tests.helpers.fitting import batches_for, fitted
from tests.helpers.native import distance
from tests.helpers.uptrain_runs import die, in_child

pytestmark = pytest.mark.usefixtures("modeling_files_registered")


def divergence(source: Any, result: Any, batches: list[dict[str, Tensor]]) -> float:
    """KL(source || result) in nats per position, by the definition."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            p, q = (log_softmax(model(**batch, use_cache=False).logits.double(), -1) for model in (source, result))
            mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
            each = (p.exp() * (p - q)).sum(-1)
            each = each if mask is None or each.shape != mask.shape else each[mask.bool()]
            total, count = total + float(each.sum()), count + each.numel()
    return total / count


@pytest.mark.parametrize(
    ("name", "rank"),
    [*((name, 0) for name in ("llama", "qwen2", "gpt2", "falcon", "bloom", "phi3", "t5", "bart")), ("llama", 3)],
)
def test_the_result_diverges_as_little_as_is_said(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted checkpoint, loaded by itself, on the text that was held out; and it is still its own expansion."""
    monkeypatch.setattr(whole_model, "RATE", 2e-3)
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    batches = batches_for(case.model, count=1) * 9  # random weights have learned nothing that other text would share
    if case.model.config.is_encoder_decoder:
        batches = [batch | {"decoder_attention_mask": padding(batch["decoder_input_ids"])} for batch in batches]
    elif name in ("llama", "gpt2"):
        batches = [batch | {"attention_mask": padding(batch["input_ids"])} for batch in batches]
    record = fitted(source, tmp_path / "out", steps=0, kl_batches=batches, kl_steps=25, kl_rank=rank)[-1]
    result = case.load(tmp_path / "out")
    assert record.kl.after < 0.97 * record.kl.before
    assert [step for step, _ in record.kl.curve] == [6, 12, 18, 24]
    assert record.kl.after < record.kl.curve[0][1] < record.kl.before
    assert divergence(open_model(source), result, [batches[0]]) == pytest.approx(record.kl.after, rel=2e-3)
    assert distance(case.logits(result), case.logits(folded.placed(case, result, 3))) < folded.EXACT


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_divergence_after_the_layers_is_that_of_the_result(name: str, tmp_path: Path) -> None:
    """On the batches that judge, the last ones."""
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    batches = batches_for(case.model, count=16)
    if case.model.config.is_encoder_decoder:
        batches = [batch | {"decoder_attention_mask": padding(batch["decoder_input_ids"])} for batch in batches]
    fitted(source, tmp_path / "out", batches=batches, steps=2)
    plan = make_plan(open_checkpoint(source), 3, method="fit", native=None if name == "llama" else False)
    with MergedLayers(tmp_path / "again", {}, keep=False) as store:
        found = fit_layers(plan, store, open_model(source), batches, lambda *_: None, steps=2)
    result = case.load(tmp_path / "out")
    assert divergence(open_model(source), result, batches[-2:]) == pytest.approx(found.divergence, rel=2e-3)


def padding(ids: Tensor) -> Tensor:
    """The second sequence ends ten positions early."""
    mask = torch.ones_like(ids)
    mask[1, -10:] = 0
    return mask


def test_the_text_that_judges_is_not_learned_from(tmp_path: Path) -> None:
    source = folded.build("llama").save(tmp_path / "source")
    model = open_model(source)
    batches = batches_for(model, count=3)
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    found, notes = [], []
    for number in range(2):
        with MergedLayers(tmp_path / str(number), {}, keep=False) as store:
            fit_layers(plan, store, model, batches, lambda *_: None, steps=0)
            train_together(plan, store, model, batches, batches[number : number + 1], lambda *_: None, steps=20, seed=0)
            found.append(contents(store, plan))
            notes.append(store.finished())
    assert found[0] == found[1]
    assert notes[0].kl.before != notes[1].kl.before


def contents(store: MergedLayers, plan: Any) -> list[dict[str, bytes]]:
    return [{name: array.tobytes() for name, array in store.read(number).items()} for number in range(len(plan.layers))]


def test_where_nothing_was_lost_nothing_is_changed(tmp_path: Path) -> None:
    case = folded.build("llama")
    folded.tie(case, 3)
    source = case.save(tmp_path / "source")
    fitted(source, tmp_path / "layers", steps=0)
    record = fitted(source, tmp_path / "whole", steps=0, kl_steps=5)[-1]
    assert record.kl.before == record.kl.after < 1e-6
    assert digests(tmp_path / "layers") == digests(tmp_path / "whole")


def test_it_is_done_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails in the midst leaves the layers as they were; another number of steps begins again from
    those.
    """
    source = folded.build("llama").save(tmp_path / "source")
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    monkeypatch.setattr(whole_model, "RATE", 2e-3)
    batches = [*batches_for(open_model(source)), *batches_for(open_model(source), count=1, seed=9) * 4]

    def run(store: MergedLayers, kl_steps: int) -> None:
        fit_checkpoint(plan, store, batches, lambda *_: None, steps=2, kl_steps=kl_steps, held_out=batches[4:5])

    with (
        MergedLayers(tmp_path / "a", {}, keep=False) as store,
        MergedLayers(tmp_path / "b", {}, keep=False) as straight,
    ):
        run(store, 0)
        before = contents(store, plan)
        put = MergedLayers._put

        def failing(self: MergedLayers, path: Path, head: bytes, arrays: Any) -> None:
            if path.name == "finished-00001.safetensors":
                raise OSError(5, "Input/output error")
            put(self, path, head, arrays)

        monkeypatch.setattr(MergedLayers, "_put", failing)
        with pytest.raises(OSError, match="Input/output"):
            run(store, 6)
        monkeypatch.setattr(MergedLayers, "_put", put)
        assert store.finished() is None
        assert contents(store, plan) == before
        run(store, 6)
        after = contents(store, plan)
        run(straight, 6)
        assert after == contents(straight, plan) != before
        run(store, 0)
        assert store.finished() is None
        assert contents(store, plan) == before


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "t5"])
def test_where_memory_is_short_layers_are_computed_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the same, and a fraction of the numbers is kept for the way back."""
    source = folded.build(name).save(tmp_path / "source")
    kept: dict[str, int] = {}
    for memory in ("long", "short"):
        monkeypatch.setattr(limits, "available_memory", lambda _, memory=memory: {"long": 1e12, "short": 1.0}[memory])
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            record = fitted(source, tmp_path / memory, steps=0, kl_steps=3)[-1]
        assert record.kl.after < record.kl.before
        kept[memory] = sum(sizes)
    assert digests(tmp_path / "long") == digests(tmp_path / "short")
    assert kept["short"] < 0.5 * kept["long"]


def test_unasked_it_is_done_only_where_it_is_worth_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folded.build("llama").save(tmp_path / "source")
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    batches = batches_for(open_model(source))
    noted = {}
    for least in (1e-9, 1e9):
        monkeypatch.setattr(whole_model, "WORTHWHILE", least)
        with MergedLayers(tmp_path / str(least), {}, keep=False) as store:
            fit_checkpoint(plan, store, batches, lambda *_: None, steps=2, default_kl_steps=2, held_out=batches[:1])
            noted[least] = store.finished()
    assert noted[1e-9] is not None
    assert noted[1e9] is not None
    assert (noted[1e-9].kl_steps, noted[1e9].kl_steps) == (2, 0)
    assert noted[1e9].kl.after == noted[1e9].kl.before == noted[1e-9].kl.before


def test_what_is_too_large_or_has_too_little_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folded.build("llama").save(tmp_path / "source")
    model, far = open_model(source), open_model(source, memory_limit=0)
    batches = batches_for(model)
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    assert affordable(plan, model, batches, 0)
    assert not affordable(plan, far, batches, 0)
    with pytest.raises(OptionError, match=r"--kl-steps 7 .*needs the model in memory"):
        check_possible(far, batches, 7)
    with pytest.raises(OptionError, match=r"--kl-steps 7 .*more text"):
        check_possible(model, [], 7)
    monkeypatch.setattr(limits, "_MOST_PARAMETERS", 1000)
    assert not affordable(plan, model, batches, 0)
    check_possible(model, batches, 7)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "falcon", "t5"])
def test_memory_for_what_is_trained_is_asked_for(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained with its gradients and moments, what that began with, and the weights that modules run with."""
    counted: list[int] = []
    copies: dict[tuple[int, str], int] = {}
    begun: list[Any] = []
    replaced = whole_model.replaced

    def replacing(module: Any, parameters: dict[str, Tensor]) -> Any:
        views = {tensor.untyped_storage().data_ptr() for parts in begun for tensor in parts.values()}
        for key, tensor in parameters.items():
            if tensor.dim() == 2:
                known = tensor.untyped_storage().data_ptr() in views
                copies[id(module), key] = 0 if known else tensor.nbytes
        return replaced(module, parameters)

    class Counted(RelativeAdam):
        def __init__(self, layers: Any, *rest: Any) -> None:
            super().__init__(layers, *rest)
            begun.extend(layers)
            begun.append(dict(enumerate(self.weights())))

        def step(self, losses: Any) -> None:
            super().step(losses)
            for before, after in zip(begun, self._layers, strict=False):
                for role in ("queries", "keys", "values", "outputs"):
                    counted.append(before[role].nbytes)
                    for weight in after[role].weights:
                        moments = self._adam.state[weight]
                        assert weight.grad is not None
                        kept = weight, weight.grad, moments["exp_avg"], moments["exp_avg_sq"]
                        counted.append(sum(each.nbytes for each in kept))

    monkeypatch.setattr(whole_model, "RelativeAdam", Counted)
    monkeypatch.setattr(whole_model, "replaced", replacing)
    case = folded.build(name)
    source, batches = case.save(tmp_path / "source"), batches_for(case.model)
    fitted(source, tmp_path / "out", steps=0, kl_batches=batches, kl_steps=1, kl_rank=rank)
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    stage = limits.trained_model(plan, max(batch["input_ids"].shape[1] for batch in batches))
    projected = 4 * stage.projected_rows * stage.hidden_size
    copied = projected + 4 * stage.repeated_rows * stage.hidden_size
    assert copied / 2 <= sum(copies.values()) <= copied
    assert stage.trained_bytes(rank) == sum(counted) + copied + (projected if rank else 0)
    needed = stage.stage_bytes(rank, recomputes=True) / limits._SHARE
    model = open_model(source)
    for free, expected in ((needed + 1, True), (needed - 1, False)):
        monkeypatch.setattr(limits, "available_memory", lambda place, free=free: free)
        assert affordable(plan, model, batches, rank) is expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "bloom", "phi3", "t5"])
def test_changes_have_the_rank_that_is_asked_for(name: str, tmp_path: Path) -> None:
    """Those of the result's query and output projections; keys and values change freely."""
    case = folded.build(name)
    source, model = case.save(tmp_path / "source"), case.model
    batches = batches_for(model)
    native = None if name in ("llama", "phi3") else False
    plan = make_plan(open_checkpoint(source), 3, method="fit", native=native)
    finder = attention_of(plan)
    found: dict[str, set[int]] = {}
    for rank in (0, 3):
        with MergedLayers(tmp_path / str(rank), {}, keep=False) as store:
            fit_layers(plan, store, open_model(source), batches, lambda *_: None, steps=0)
            before = [store.read(number) for number in range(len(plan.merged_layers))]
            options: dict[str, Any] = {"steps": 12, "seed": 0, "rank": rank}
            train_together(plan, store, open_model(source), batches, batches[:1], lambda *_: None, **options)
            note = store.finished()
            assert note is not None
            assert note.kl.after < note.kl.before
            assert note.kl_rank == rank
            for number, (layer, _) in enumerate(plan.merged_layers):
                old, new = (
                    projections(LayerLayout(finder, layer), each) for each in (before[number], store.read(number))
                )
                for role in old:
                    change = new[role] - old[role]
                    found.setdefault(f"{role}, {rank}", set()).add(
                        int(np.linalg.matrix_rank(change, tol=1e-4 * np.linalg.norm(change, 2)))
                    )
    assert found["queries, 3"] == found["outputs, 3"] == {3}
    free = found["queries, 0"] | found["outputs, 0"] | found["keys, 3"] | found["values, 3"]
    assert min(free) > 8


def projections(layout: LayerLayout, tensors: Tensors) -> dict[str, Any]:
    """Those of a layer with 3 K/V heads, without biases; the rows of a head lie together."""
    heads = layout.split_heads(tensors, 3)
    found = {role: getattr(heads, role)[..., :-1] for role in ("queries", "keys", "values")}
    found = {role: array.reshape(-1, array.shape[-1]) for role, array in found.items()}
    columns = heads.outputs.transpose(2, 0, 1, 3)
    return found | {"outputs": columns.reshape(len(columns), -1)}


def test_where_memory_is_short_changes_have_a_low_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is trained as it is; the rank that was asked for counts more than memory."""
    source = folded.build("llama").save(tmp_path / "source")
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    monkeypatch.setattr(limits, "LOW_RANK", 2)
    model = open_model(source)
    batches = batches_for(model)
    stage = limits.trained_model(plan, max(batch["input_ids"].shape[1] for batch in batches))
    whole, low = (stage.stage_bytes(rank, recomputes=True) / limits._SHARE for rank in (0, 2))
    assert low < whole
    found = {}
    for free in (whole + 1, whole - 1, low + 1, low - 1):
        monkeypatch.setattr(limits, "available_memory", lambda place, free=free: free)
        rank = rank_for(plan, model, batches, None)
        found[free] = rank, affordable(plan, model, batches, rank)
        assert [rank_for(plan, model, batches, asked) for asked in (0, 5)] == [0, 5]
    assert list(found.values()) == [(0, True), (2, True), (2, True), (2, False)]
    monkeypatch.setattr(limits, "available_memory", lambda place: whole - 1)
    with MergedLayers(tmp_path / "store", {}, keep=False) as store:
        run = partial(fit_checkpoint, plan, store, batches, lambda *_: None, steps=2, held_out=batches[:1])
        trained = []
        for asked in ({}, {"kl_rank": 0}, {"kl_rank": 2}):
            run(kl_steps=2, **asked)
            note = store.finished()
            assert note is not None
            trained.append((note.kl_rank, note.requested_rank, contents(store, plan)))
    assert [(rank, asked) for rank, asked, _ in trained] == [(2, None), (0, 0), (2, 2)]
    assert trained[0][2] == trained[2][2] != trained[1][2]


@pytest.mark.slow
def test_killed_in_this_stage_it_goes_on_to_the_same_bytes(small: Path, text: Path, tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    fitting = {"calibration": text, "calibration_tokens": 1500, "fit_steps": 3}
    convert_checkpoint(small, straight, 3, **fitting, kl_steps=8)

    def killed(done: int, total: int, record: Any) -> None:
        if isinstance(record, TrainingProgress) and record.done == 2:
            assert done == total == 3
            die()

    status, problem = in_child(lambda: convert_checkpoint(small, resumed, 3, **fitting, kl_steps=2000, on_layer=killed))
    assert (status, problem) == (-signal.SIGKILL, "")
    assert not resumed.exists()
    options = ["--calibration", text, "--calibration-tokens", "1500", "--fit-steps", "3", "--kl-steps", "8"]
    again = run("convert", small, resumed, "--groups", "3", *options)
    assert again.returncode == 0, again.stderr
    assert "divergence from the source" in again.stderr
    assert digests(straight) == digests(resumed)
    note = json.loads((resumed / "gqa_conversion.json").read_text())["calibration"]
    assert note["kl_steps"] == 8
    assert note["kl"]["after"] < note["kl"]["before"]
    assert note["kl"]["curve"][0][0] == note["kl_steps"] // 4
