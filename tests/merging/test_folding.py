"""Merging whole attention layers: errors against sums written out, edge cases of the numbers, and the files of layers
that are done.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert import errors
from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit import from_weights
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.records import CalibratedRecord, TrainingRecord, WeightsRecord
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ConfigError, NonFiniteError, OutputError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.absorption_limits import AbsorptionLimits, find_absorption_limits, rotary_pairs
from gqa_convert.merging.attention_heads import Heads, LayerLayout
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.merging.reconstruction_error import reconstruction_errors
from tests.helpers.checkpoints import HEADS, Arrays, digests, llama_arrays, read_weights, same_weights, write_llama
from tests.helpers.command_line import run, run_python

Array = np.ndarray[Any, Any]
K, R, WIDTH, VALUE, INPUTS, ASKED, OUTPUTS = 6, 2, 10, 7, 23, 19, 9
PAIRS = np.array([0, 1, 2]), np.array([3, 4, 5])
"""Of the ten dimensions of a key head, six are rotary."""
NO_PAIRS = np.empty(0, int), np.empty(0, int)


def random_heads(rng: np.random.Generator, *, cross: bool = False) -> Heads:
    asked = ASKED if cross else INPUTS
    return Heads(
        queries=rng.standard_normal((K, R, WIDTH, asked)),
        keys=rng.standard_normal((K, WIDTH, INPUTS)),
        values=rng.standard_normal((K, VALUE, INPUTS)),
        outputs=rng.standard_normal((K, R, OUTPUTS, VALUE)),
        output_bias=None,
    )


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def summed_errors(
    source: Heads, merged: Heads, constraints: AbsorptionLimits, asking: Array, seen: Array
) -> tuple[float, float]:
    """Scores of every input with every other at every distance, one by one. Samples are [n, inputs]."""
    real, imaginary = constraints.pairs
    rest = np.setdiff1d(np.arange(WIDTH), np.concatenate(constraints.pairs))
    period = 16
    angles = (
        2 * np.pi / period * np.outer(np.arange(period), [1, 2, 5][: len(real)])
    )  # no two frequencies, nor their sums, are alike
    size = source.groups // merged.groups
    differences, totals = np.zeros(2), np.zeros(2)
    for head in range(source.groups):
        layers_ = (source, head), (merged, head // size)
        for number in range(R):
            scores = []
            for layer, own in layers_:
                query, key = layer.queries[head, number], layer.keys[own]
                still = (asking @ query[rest].T) @ (key[rest] @ (seen - seen.mean(0)).T)
                x, y = asking @ query.T, seen @ key.T
                each = []
                for angle in angles:
                    cos, sin = np.cos(angle), np.sin(angle)
                    turned = [x[:, real] * cos - x[:, imaginary] * sin, x[:, imaginary] * cos + x[:, real] * sin]
                    each.append(turned[0] @ y[:, real].T + turned[1] @ y[:, imaginary].T + still)
                scores.append(np.stack(each))
            differences[0] += np.square(scores[0] - scores[1]).mean()
            totals[0] += np.square(scores[0]).mean()
            brought = [layer.outputs[head, number] @ layer.values[own] @ seen.T for layer, own in layers_]
            differences[1] += np.square(brought[0] - brought[1]).mean()
            totals[1] += np.square(brought[0]).mean()
    keys, values = np.sqrt(differences / totals)
    return float(keys), float(values)


@pytest.mark.parametrize("pairs", [PAIRS, NO_PAIRS])
@pytest.mark.parametrize("cross", [False, True])
def test_errors_are_those_of_the_scores(rng: np.random.Generator, cross: bool, pairs: tuple[Array, Array]) -> None:
    """Moments of samples: the sum over all pairs of samples and all distances."""
    source, constraints = random_heads(rng, cross=cross), AbsorptionLimits(pairs)
    seen = np.concatenate([rng.standard_normal((31, INPUTS - 1)) + 0.5, np.ones((31, 1))], axis=1)
    asking = np.concatenate([rng.standard_normal((28, ASKED - 1)), np.ones((28, 1))], axis=1) if cross else seen
    moments = Moments(asking.T @ asking / len(asking), seen.T @ seen / len(seen))
    merged = merge_layer(source, 2, constraints, moments)
    assert reconstruction_errors(source, merged, constraints, moments) == pytest.approx(
        summed_errors(source, merged, constraints, asking, seen), rel=1e-9
    )


def test_errors_without_moments(rng: np.random.Generator) -> None:
    """Every direction once: samples whose second moment is the identity, and whose mean is nothing."""
    source, constraints = random_heads(rng), AbsorptionLimits(PAIRS)
    samples = np.concatenate([np.eye(INPUTS), -np.eye(INPUTS)]) * np.sqrt(INPUTS)
    merged = merge_layer(source, 3, constraints, None)
    found = reconstruction_errors(source, merged, constraints, None)
    assert found == pytest.approx(summed_errors(source, merged, constraints, samples, samples), rel=1e-9)
    assert min(found) > 0.3


def test_errors_of_what_loses_nothing(rng: np.random.Generator) -> None:
    heads, constraints = random_heads(rng), AbsorptionLimits(PAIRS)
    tied = Heads(
        heads.queries, heads.keys[:1].repeat(K, axis=0), heads.values[:1].repeat(K, axis=0), heads.outputs, None
    )
    assert max(reconstruction_errors(tied, merge_layer(tied, 2, constraints, None), constraints, None)) < 1e-7
    assert reconstruction_errors(heads, merge_layer(heads, K, constraints, None), constraints, None) == (0.0, 0.0)
    assert merge_layer(heads, K, constraints, None) is heads


def test_folding_constraints_leave_the_mean(rng: np.random.Generator) -> None:
    heads = random_heads(rng)
    merged = merge_layer(heads, 2, AbsorptionLimits(PAIRS, "of a norm", "of a gate"), None)
    assert np.allclose(merged.keys, heads.keys.reshape(2, 3, WIDTH, INPUTS).mean(1))
    assert np.allclose(merged.values, heads.values.reshape(2, 3, VALUE, INPUTS).mean(1))
    assert np.array_equal(merged.queries, heads.queries)
    assert np.array_equal(merged.outputs, heads.outputs)


def test_factoring_loses_least(rng: np.random.Generator) -> None:
    heads, constraints = random_heads(rng), AbsorptionLimits(PAIRS)
    samples = rng.standard_normal((40, INPUTS)) * rng.uniform(0.1, 3, INPUTS)
    samples[:, -1] = 1
    moments = Moments(samples.T @ samples / 40, samples.T @ samples / 40)
    found = reconstruction_errors(heads, merge_layer(heads, 2, constraints, moments), constraints, moments)
    mean = reconstruction_errors(
        heads, merge_layer(heads, 2, AbsorptionLimits(PAIRS, "x", "x"), moments), constraints, moments
    )
    assert found[1] < mean[1]
    assert found[0] < mean[0]


def spoilt(kind: str) -> Callable[[Array], Array]:
    return {
        "zero": np.zeros_like,
        "constant": lambda array: np.full_like(array, 0.25),
        "rank one": lambda array: np.outer(array[:, 0], array[0]).astype(array.dtype),
        "tiny": lambda array: (array * 1e-30).astype(array.dtype),
        "huge": lambda array: (array * 1e15).astype(array.dtype),
    }[kind]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("where", ["q", "k", "v", "o", "qkvo"])
@pytest.mark.parametrize("kind", ["zero", "constant", "rank one", "tiny", "huge"])
def test_odd_weights_give_finite_ones(kind: str, where: str, tmp_path: Path) -> None:
    arrays = llama_arrays(layers=1)
    for name in where:
        tensor = f"model.layers.0.self_attn.{name}_proj.weight"
        arrays[tensor] = spoilt(kind)(arrays[tensor])
    source = write_llama(tmp_path / "source", arrays=arrays, config={"num_hidden_layers": 1})
    result = convert_checkpoint(source, tmp_path / "out", 3, method="factor")
    assert all(np.isfinite(array).all() for array in read_weights(tmp_path / "out").values())
    assert all(np.isfinite(error) and error >= 0 for error in result.merge_error.values())


def test_own_count_and_more(tmp_path: Path) -> None:
    """As many groups as heads: every bit. More than there are: heads repeated."""
    source = write_llama(tmp_path / "source", config={"num_key_value_heads": 4}, arrays=grouped(4))
    result = convert_checkpoint(source, tmp_path / "same", 4, method="factor")
    assert result.plan.effective_method == "copy"
    assert same_weights(source, tmp_path / "same")
    result = convert_checkpoint(source, tmp_path / "more", 12, method="factor")
    assert result.plan.effective_method == "repeat"
    before, after = read_weights(source), read_weights(tmp_path / "more")
    for name, array in before.items():
        expected = (
            array.reshape(4, -1, array.shape[1]).repeat(3, axis=0).reshape(-1, array.shape[1]) if kv(name) else array
        )
        assert np.array_equal(after[name], expected)


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", shards=3)
    for out in ("first", "second"):
        convert_checkpoint(source, tmp_path / out, 3, method="factor")
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    changed = {
        name for name, array in read_weights(tmp_path / "first").items() if not same(array, read_weights(source)[name])
    }
    assert changed == {f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"}


def kv(name: str) -> bool:
    return name.endswith(("k_proj.weight", "v_proj.weight"))


def same(left: Array, right: Array) -> bool:
    return left.shape == right.shape and np.array_equal(left, right)


def grouped(kv_heads: int) -> Arrays:
    """A Llama's tensors with so many K/V heads."""
    return {
        name: array[: len(array) * kv_heads // HEADS] if kv(name) else array for name, array in llama_arrays().items()
    }


class TestNaN:
    @pytest.mark.parametrize("name", ["q", "k", "v", "o"])
    def test_one_line_that_names_the_tensor(self, name: str, tmp_path: Path) -> None:
        arrays = llama_arrays()
        tensor = f"model.layers.1.self_attn.{name}_proj.weight"
        arrays[tensor][3, 5] = np.nan
        source = write_llama(tmp_path / "source", arrays=arrays)
        with pytest.raises(NonFiniteError, match=tensor) as caught:
            convert_checkpoint(source, tmp_path / "out", 3, method="factor")
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_exit_code(self, tmp_path: Path) -> None:
        arrays = llama_arrays()
        arrays["model.layers.0.self_attn.o_proj.weight"][0, 0] = np.inf
        source = write_llama(tmp_path / "source", arrays=arrays)
        ended = run("convert", source, tmp_path / "out", "--groups", "3", "--method", "factor", "--quiet")
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert "model.layers.0.self_attn.o_proj.weight holds NaN or Inf" in ended.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


KILLED = """
import os, signal, sys
from gqa_convert.conversion.run import convert_checkpoint
def done(number, total, record):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert_checkpoint(sys.argv[1], sys.argv[2], 3, method="factor", on_layer=done)
"""


def interrupted(folder: Path, work: Callable[[MergedLayers], None]) -> None:
    """Work that an error ends, which leaves the store where it is."""
    store = MergedLayers(folder / "out", {"made": 1}, keep=True)
    with pytest.raises(OSError, match="gone"), store:
        _work_and_fail(store, work)


def _work_and_fail(store: MergedLayers, work: Callable[[MergedLayers], None]) -> None:
    work(store)
    raise OSError("gone")


RECORD = WeightsRecord(module="a", keys=0.0, values=0.0)


class TestStore:
    @pytest.mark.parametrize(("groups", "seed", "made_again"), [(3, 0, 1), (4, 0, 3), (3, 1, 3)])
    def test_a_kill_between_layers(
        self, groups: int, seed: int, made_again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next run goes on where it was killed if it is for the same of an unchanged source, and begins anew if
        not.
        """
        source, out, config = tmp_path / "source", tmp_path / "out", {"num_hidden_layers": 3}
        write_llama(source, arrays=llama_arrays(layers=3), config=config)
        ended = run_python("-c", KILLED, source, out, models=False)
        assert ended.returncode == -signal.SIGKILL
        assert not out.exists()
        assert {path.name for path in (tmp_path / ".out.gqa-merging").glob("layer-*")} == {
            f"layer-0000{n}.safetensors" for n in (0, 1)
        }
        if seed:
            write_llama(source, arrays=llama_arrays(layers=3, seed=seed), config=config)
        made = []
        original = from_weights.merge_layer
        monkeypatch.setattr(from_weights, "merge_layer", lambda *given: made.append(given) or original(*given))
        convert_checkpoint(source, out, groups, method="factor")
        assert len(made) == made_again
        convert_checkpoint(source, tmp_path / "fresh", groups, method="factor")
        assert digests(out) == digests(tmp_path / "fresh")
        assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "fresh"}

    @pytest.mark.parametrize(
        ("problem", "told"),
        [
            (errors.InterruptedRunError("stopped"), errors.InterruptedRunError),
            (OSError("the disk failed"), errors.OutputError),
            (KeyboardInterrupt(), KeyboardInterrupt),
        ],
    )
    def test_errors_leave_nothing(self, problem: BaseException, told: type[BaseException], tmp_path: Path) -> None:
        def done(number: int, total: int, record: Any) -> None:
            del number, total, record
            raise problem

        source = write_llama(tmp_path / "source")
        with pytest.raises(told):
            convert_checkpoint(source, tmp_path / "out", 3, method="factor", on_layer=done)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_success_leaves_nothing(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int, str]] = []

        def done(number: int, total: int, record: Any) -> None:
            seen.append((number, total, record.module))

        convert_checkpoint(write_llama(tmp_path / "source"), tmp_path / "out", 3, method="factor", on_layer=done)
        assert seen == [(1, 2, "model.layers.0.self_attn"), (2, 2, "model.layers.1.self_attn")]
        assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}

    def test_kept_if_asked(self, tmp_path: Path) -> None:
        layer = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, np.float16)}
        record = WeightsRecord(module="a", keys=0.5, values=0.25, head_order=(1, 0))
        interrupted(tmp_path, lambda store: store.write(4, layer, record))
        with MergedLayers(tmp_path / "out", {"made": 1}, keep=True) as store:
            assert store.record(3) is None
            assert store.record(4) == record
            found = store.read(4)
            assert found.keys() == layer.keys()
            assert all(
                np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in layer.items()
            )
            del found
        assert list(tmp_path.iterdir()) == []

    def test_other_work_and_damage(self, tmp_path: Path) -> None:
        def look(store: MergedLayers) -> None:
            assert store.record(0) == RECORD
            assert store.record(1) is None
            assert {path for path, _ in store.tensors(2).values()} == {store.path / "layer-00000.safetensors"}

        for number in (0, 1):
            interrupted(
                tmp_path, lambda store, number=number: store.write(number, {"weight": np.ones(3, np.float32)}, RECORD)
            )
        damaged = tmp_path / ".out.gqa-merging" / "layer-00001.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-5])
        interrupted(tmp_path, look)
        with MergedLayers(tmp_path / "out", {"made": 2}, keep=True) as store:
            assert store.record(0) is None

    def test_records_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        record = CalibratedRecord(module="a", output=0.25, gap_left=0.5, first_low_frequency_pair=None)
        with MergedLayers(tmp_path / "out", {}, keep=False) as store:
            store.write(0, {"weight": np.ones(3, np.float32)}, record)
            assert store.record(0) == record
            training = TrainingRecord(
                kl_steps=3, kl=Divergence(0.5, 0.25), requested_steps=None, kl_rank=0, requested_rank=None
            )
            store.finish({0: {"weight": np.zeros(3, np.float32)}}, training)
            assert store.finished() == training
            assert store.record(0) == record
            assert not store.read(0)["weight"].any()

    def test_one_run_at_a_time(self, tmp_path: Path) -> None:
        with (
            MergedLayers(tmp_path / "out", {}, keep=False),
            pytest.raises(OutputError, match="locked"),
            MergedLayers(tmp_path / "out", {}, keep=False),
        ):
            pass
        assert list(tmp_path.iterdir()) == []


class TestLayers:
    def test_nothing_is_lost_by_cutting_and_joining(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_llama(tmp_path / "source"))
        weights = read_weights(tmp_path / "source")
        finder = AttentionFinder(checkpoint, FAMILIES["llama"])
        for layer in finder.layers:
            parts = LayerLayout(finder, layer)
            tensors = {name: weights[name] for name in parts.names}
            joined = parts.merge_heads(parts.split_heads(tensors), tensors, HEADS)
            assert joined.keys() == tensors.keys()
            assert all(
                same(joined[name], array) and joined[name].dtype == array.dtype for name, array in tensors.items()
            )
            heads = parts.split_heads(tensors)
            assert heads.queries.shape == (HEADS, 1, 8, 61)
            assert heads.outputs.shape == (HEADS, 1, 60, 8)
            assert same(
                heads.outputs[5, 0], tensors[f"{parts.layer.module}.o_proj.weight"][:, 40:48].astype(np.float64)
            )

    def test_what_can_be_folded(self, tmp_path: Path) -> None:
        finder = AttentionFinder(open_checkpoint(write_llama(tmp_path / "source")), FAMILIES["llama"])
        module = finder.layers[0].module
        assert LayerLayout(finder, finder.layers[0]).absorbing == {
            f"{module}.q_proj.weight": "query",
            f"{module}.o_proj.weight": "output",
        }

    def test_folding_constraints_are_clauses(self, tmp_path: Path) -> None:
        clauses = {
            each for family in FAMILIES.values() for each in (family.key_constraint, family.value_constraint) if each
        }
        finder = AttentionFinder(
            open_checkpoint(write_llama(tmp_path / "source", config={"clip_qkv": 8.0})), FAMILIES["llama"]
        )
        constraints = find_absorption_limits(finder, finder.layers[0])
        assert constraints.key_constraint is not None
        assert constraints.key_constraint == constraints.value_constraint
        for clause in {*clauses, constraints.key_constraint}:
            assert clause[0].islower()
            assert clause[-1].isalpha()


@pytest.mark.parametrize(
    ("model_type", "config", "rotated"),
    [
        ("llama", {}, 16),
        ("llama", {"partial_rotary_factor": 0.5}, 16),
        ("phi3", {"partial_rotary_factor": 0.75}, 12),
        ("phi3", {}, 16),
        ("gpt_neox", {"rotary_pct": 0.5}, 8),
        ("gqa_gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.5}, "rotary_pct": 0.25}, 8),
        ("minimax_m2", {"rotary_dim": 4}, 4),
        ("minimax_m2", {"rotary_dim": 4, "partial_rotary_factor": 0.5}, 8),
        ("minimax", {"rotary_dim": 4}, 16),
        ("gptj", {"rotary_dim": 6}, 6),
        ("codegen", {"rotary_dim": None}, 16),
        ("falcon", {"alibi": True}, 0),
        ("falcon", {}, 16),
        ("bloom", {}, 0),
        ("zamba2", {}, 0),
        ("zamba2", {"use_mem_rope": True}, 16),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, 16),
        ("granitemoehybrid", {}, 0),
        ("chatglm", {}, 8),
        ("stablelm", {}, 4),
    ],
)
def test_rotary_dimensions(model_type: str, config: dict[str, Any], rotated: int) -> None:
    """Of 16, by configs as they lie on the Hub."""
    real, imaginary = rotary_pairs(FAMILIES[model_type], config, 16)
    assert sorted([*real, *imaginary]) == list(range(rotated))
    if FAMILIES[model_type].rotary == "interleaved":
        assert np.array_equal(imaginary, real + 1)
    else:
        assert np.array_equal(imaginary, real + rotated // 2)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gptj", {"rotary_dim": 5}),
        ("gptj", {"rotary_dim": 18}),
        ("gptj", {"rotary_dim": "6"}),
        ("phi3", {"partial_rotary_factor": 0.07}),
        ("phi3", {"partial_rotary_factor": "half"}),
        ("phi3", {"partial_rotary_factor": -0.5}),
    ],
)
def test_rotary_dimensions_that_make_no_pairs(model_type: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="repair it") as caught:
        rotary_pairs(FAMILIES[model_type], json.loads(json.dumps(config)), 16)
    assert "\n" not in str(caught.value)
