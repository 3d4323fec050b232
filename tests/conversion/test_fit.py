"""Calibrated merging: what is fitted is exact where it can be, equals its own expansion, and
survives kills and poor text.
"""

import gc
import signal
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import fitting, resources
from gqa_convert.conversion.layers import model_loading, one_layer, statistics
from gqa_convert.conversion.layers.attention_calls import AttentionCall, beginnings
from gqa_convert.conversion.layers.layer_fitting import fit_layers
from gqa_convert.conversion.layers.layer_store import LayerRecord, LayerStore
from gqa_convert.conversion.layers.merged_attention import MergedAttention
from gqa_convert.conversion.layers.model_loading import find_modules, open_model, precision_of
from gqa_convert.conversion.layers.one_layer import FitOptions, OneLayer, least
from gqa_convert.conversion.layers.statistics import (
    DAMPING,
    Regression,
    best_strength,
    damped_moment,
)
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.progress import FitProgress
from gqa_convert.conversion.resources import half_type, held_bytes, is_reduced
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import NonFiniteError, OptionError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.attention_heads import LayerLayout
from tests.helpers import folding_cases as folded
from tests.helpers.chatglm import write_source
from tests.helpers.checkpoints import digests
from tests.helpers.fitting import EXACT, batches_for, fitted, plan_of
from tests.helpers.native import distance
from tests.helpers.selection import slow_but
from tests.helpers.tiny import VOCAB
from tests.helpers.uptrain_runs import die, in_child

pytestmark = pytest.mark.usefixtures("modeling_files_registered")


def output(record: LayerRecord) -> float:
    """The part of its target that a layer misses."""
    (error,) = record.errors.values()
    return error


CASES = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_next",
        "gpt2",
        "gpt_neox",
        "bloom",
        "falcon",
        "mpt",
        "opt",
        "phi3",
        "stablelm",
    ),
    *("cohere", "granite", "gemma2", "olmo2", "t5", "bart", "mbart"),
)
"""Every layout, every kind of position, norms in all places, residual streams of every kind."""
EVERY_RUN = ("llama", "gpt2", "bloom", "olmo2", "t5")


@pytest.mark.parametrize("name", slow_but(EVERY_RUN, CASES))
def test_the_result_is_its_own_expansion_and_beats_the_mean(name: str, tmp_path: Path) -> None:
    """Every layer of random heads; the source's model with the result's numbers, heads repeated,
    computes what the result computes.
    """
    case = folded.build(name)
    source, out, groups = (
        case.save(tmp_path / "source"),
        tmp_path / "out",
        3 + CASES.index(name) % 2,
    )
    records, *_ = fitted(source, out, groups, batches=batches_for(case.model, count=16))
    # on held-out tokens; behind the first layer, the output misses the errors of the layers below
    # as well
    assert all(0 < output(record) < 1 and record.error_vs_mean < 1 for record in records)
    assert records[0].error_vs_mean < 0.8
    result = case.load(out)
    assert (
        distance(case.logits(result), case.logits(folded.placed(case, result, groups)))
        < folded.EXACT
    )


@pytest.mark.parametrize(
    "name", slow_but(EVERY_RUN, ["llama", "qwen2", "gpt2", "gpt_neox", "bloom", "t5", "bart"])
)
def test_heads_that_differ_by_maps_merge_without_loss(name: str, tmp_path: Path) -> None:
    """Through the whole closed loop, gradient stage allowed."""
    case = folded.build(name)
    expected = folded.tie(case, 3).logits()
    records, *_ = fitted(case.save(tmp_path / "source"), tmp_path / "out")
    assert all(output(record) < EXACT for record in records)
    assert distance(case.logits(case.load(tmp_path / "out")), expected) < EXACT


@pytest.mark.parametrize(
    "name", [name for name in folded.SOME if name != "zamba2"]
)  # its modules share weights
def test_an_installed_layer_computes_what_its_repeated_tensors_do(
    name: str, tmp_path: Path
) -> None:
    """Rows gathered, or outputs repeated, in torch; and rows repeated in numpy by the layout's
    code.
    """
    case = folded.build(name)
    checkpoint = open_checkpoint(case.save(tmp_path / "source"))
    finder = AttentionFinder(checkpoint, FAMILIES[case.model_type])
    found = {
        name: parameter.detach().numpy() for name, parameter in case.model.state_dict().items()
    }
    modules = find_modules(case.model, [layer.module for layer in finder.layers])
    before = case.logits()
    with ExitStack() as stack:
        expected = {}
        for layer in finder.layers:
            layout = LayerLayout(finder, layer)
            tensors = {name: _stored(found, name) for name in layout.names}
            source = layout.split_heads(tensors)
            groups = 1 if layer.kv_heads == 1 else layer.kv_heads // 2
            others = {role: -array for role, array in vars(source).items() if array is not None}
            others |= {role: others[role][-groups:] for role in ("keys", "values")}
            merged = layout.merge_heads(replace(source, **others), tensors, groups)
            for key, array in layout.merge_heads(
                replace(source, **others), merged, layer.kv_heads
            ).items():
                expected[f"{modules[layer.module]}.{key.removeprefix(f'{layer.module}.')}"] = (
                    torch.from_numpy(array)
                )
            module = MergedAttention(
                layout, merged, groups, case.model.get_submodule(modules[layer.module])
            )
            joined = module.joined(module.tensors)
            assert joined.keys() == {*layout.projections, *layout.output_names} & merged.keys()
            assert all(np.array_equal(tensor, merged[name]) for name, tensor in joined.items())
            stack.enter_context(module.installed(module.tensors))
        installed = case.logits()
    assert torch.equal(case.logits(), before)
    case.model.load_state_dict(expected, strict=False)
    assert distance(installed, case.logits()) < folded.EXACT
    assert distance(installed, before) > 1e-3


def _stored(found: dict[str, Any], name: str) -> Any:
    """By the end of its name, which files shorten."""
    return next(array for key, array in found.items() if key == name or key.endswith(f".{name}"))


def test_moments_and_ridge_are_what_they_say() -> None:
    generator = np.random.default_rng(0)
    rows, targets = generator.standard_normal((30, 5)), generator.standard_normal((30, 4))
    moment = damped_moment([torch.from_numpy(rows).view(2, 15, 5)])
    extended = np.concatenate([rows, np.ones((30, 1))], axis=1)
    expected = extended.T @ extended / 30
    expected[np.diag_indices(5)] += DAMPING * np.diag(expected)[:5].mean()
    np.testing.assert_allclose(moment, expected, atol=1e-6)  # products are made in float32

    regression = Regression(biased=True)
    regression.add(
        torch.from_numpy(rows).view(2, 15, 5),
        torch.from_numpy(targets).view(2, 15, 4),
        torch.ones(2, 15),
    )
    change = regression.change(0.3)
    # the same as least squares with rows that keep the change small
    penalty = np.sqrt(0.3 * np.mean(np.diag(extended.T @ extended)[:5])) * np.eye(6)
    zeros = np.zeros((6, 4))
    solution = np.linalg.lstsq(
        np.concatenate([extended, penalty]), np.concatenate([targets, zeros]), rcond=None
    )[0]
    np.testing.assert_allclose(change.numpy(), solution, atol=1e-5)
    left = np.square(targets - extended @ solution).sum()
    assert regression.error(change) == pytest.approx(left)
    assert regression.power == pytest.approx(np.square(targets).sum())


def test_errors_count_by_their_weights() -> None:
    generator = np.random.default_rng(0)
    rows, targets = generator.standard_normal((2, 50, 5)), generator.standard_normal((2, 50, 4))
    weights = generator.random((2, 50))
    roots = np.sqrt(weights.reshape(100, 1))
    states, errors = torch.from_numpy(rows), torch.from_numpy(targets)
    regression = Regression(biased=False)
    regression.add(states, errors, torch.from_numpy(weights))
    wanted = roots * targets.reshape(100, 4)
    solution = np.linalg.lstsq(roots * rows.reshape(100, 5), wanted, rcond=None)[0]
    np.testing.assert_allclose(regression.change(1e-9).numpy(), solution, atol=1e-5)
    assert regression.power == pytest.approx(np.square(wanted).sum())
    call = AttentionCall(
        states, (), {}, errors, errors, torch.from_numpy(weights), number=0, all_rows=2
    )
    assert float(call.squared(errors)) == pytest.approx(np.square(wanted).sum())


def test_an_error_in_a_massive_state_counts_by_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token's embedding is a hundred times as long as all others, and so is every state that
    it enters.
    """
    case = folded.build("llama")
    embeddings = case.model.get_input_embeddings().weight
    embeddings.data[7] *= 100 * embeddings.data.norm(dim=-1).median() / embeddings.data[7].norm()
    batches = [{"input_ids": torch.randint(8, VOCAB, (2, 40))} for _ in range(3)]
    for batch in batches:
        batch["input_ids"][:, 0] = 7
    seen: list[AttentionCall] = []
    fit = OneLayer.fit

    def noted(self: OneLayer) -> Any:
        seen.extend(self._attention.calls)
        return fit(self)

    monkeypatch.setattr(OneLayer, "fit", noted)
    fitted(case.save(tmp_path / "source"), tmp_path / "out", batches=batches, steps=0)
    assert {call.weights.shape[1] for call in seen} == {40, 2}
    for call in (call for call in seen if call.weights.shape[1] == 40):
        assert (call.weights[:, 1:] == 1).all()
        assert (call.weights[:, 0] < 0.02).all()


def test_tokens_are_read_as_beginnings() -> None:
    blocks = [
        {"input_ids": torch.arange(400 * number, 400 * number + 400).view(4, 100)}
        for number in range(2)
    ]
    (batch,) = beginnings(blocks, blocks)
    assert batch.keys() == {"input_ids"}
    assert batch["input_ids"].shape == (48, 1)
    tokens = batch["input_ids"].flatten()
    assert (tokens[0], tokens[-1]) == (0, 799)
    assert {int(gap) for gap in tokens.diff()} == {17}
    for block in blocks:
        block["input_ids"][:, 0] = 5
    (batch,) = beginnings(blocks, blocks)
    assert batch["input_ids"].shape == (48, 2)
    assert (batch["input_ids"][:, 0] == 5).all()
    assert beginnings([], blocks) == []
    (alone,) = beginnings([{"input_ids": torch.full((1, 100), 9)}], blocks)
    assert alone["input_ids"].tolist() == 6 * [[5, 9]]
    pairs = [{"input_ids": torch.zeros(1, 9), "decoder_input_ids": torch.zeros(1, 9)}]
    assert beginnings(pairs, pairs) == []
    many = beginnings([{"input_ids": torch.zeros(50, 1000, dtype=torch.long)}], blocks)
    assert [len(batch["input_ids"]) for batch in many] == [1024, 1024, 952]


@pytest.mark.parametrize("noise", [0.0, 0.3, 100.0])
def test_held_out_text_decides_how_much_is_repaired(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, texts = normal(20, 8), []
    for _ in range(2):
        inputs = normal(1, 30, 20)
        texts.append(Regression(biased=False))
        texts[-1].add(inputs, inputs @ weight + noise * normal(1, 30, 8), torch.ones(1, 30))
    strength, share = best_strength(*texts)
    if noise == 100:  # 30 tokens of noise predict nothing on other text
        assert strength is None or strength >= 1
    else:
        assert strength is not None
        assert share > (0.98 if noise == 0 else 0.8)
    left = 1.0 if strength is None else texts[1].error(texts[0].change(strength)) / texts[1].power
    assert share == pytest.approx(1 - left)
    assert share >= 0
    monkeypatch.setattr(statistics, "_SAMPLED", 4)
    assert torch.allclose(texts[0].sampled().change(1.0), texts[0].change(1.0)[:, ::2])
    assert 0 < texts[1].sampled().power < texts[1].power


def test_least_finds_the_bottom() -> None:
    for bottom in range(17):
        asked: list[int] = []

        def error(number: int, bottom: int = bottom, asked: list[int] = asked) -> float:
            asked.append(number)
            return abs(number - bottom) * (3.0 if number < bottom else 1.0)

        assert least(error, 16) == bottom
        assert len(asked) == len(set(asked)) < 13


def test_precision_is_reduced_for_wide_sources_of_16_bits(
    tmp_path: Path, fast_bfloat16: bool
) -> None:
    for hidden_size, dtype in ((128, torch.bfloat16), (256, torch.float32), (256, torch.bfloat16)):
        sizes = {
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "vocab_size": 64,
        }
        folder = tmp_path / f"{hidden_size}-{dtype}"
        LlamaForCausalLM(LlamaConfig(hidden_size=hidden_size, **sizes)).to(dtype).save_pretrained(
            folder
        )
        reduced = is_reduced(plan_of(folder, 2), torch.device("cpu"))
        assert (precision_of(reduced, torch.device("cpu")) is not nullcontext) == reduced
        assert reduced == (fast_bfloat16 and hidden_size == 256 and dtype == torch.bfloat16)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A Llama whose products are reduced, with a head of its own."""
    sizes = {
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 320,
        "vocab_size": VOCAB,
    }
    config = LlamaConfig(hidden_size=256, num_key_value_heads=4, tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    return (
        LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "wide") or tmp_path / "wide"
    )


def test_weights_of_16_bits_compute_what_widened_ones_do(wide: Path) -> None:
    """Under autocast and outside of it, bit for bit; and they take what the estimate says."""
    whole, halves = open_model(wide), open_model(wide, halves=True)
    types = {name: parameter.dtype for name, parameter in halves.named_parameters()}
    assert {
        types[name] for name in ("lm_head.weight", "model.layers.1.self_attn.q_proj.weight")
    } == {torch.bfloat16}
    assert {types[name] for name in ("model.embed_tokens.weight", "model.norm.weight")} == {
        torch.float32
    }
    taken = sum(parameter.nbytes for parameter in halves.parameters())
    assert (
        taken
        == held_bytes(open_checkpoint(wide), halves=True)
        < 0.6 * held_bytes(open_checkpoint(wide), halves=False)
    )
    (batch, *_) = batches_for(whole)
    for precision in (nullcontext, partial(torch.autocast, "cpu", torch.bfloat16)):
        with torch.no_grad(), precision():
            assert torch.equal(halves(**batch).logits, whole(**batch).logits)


def test_matrices_are_held_in_halves_where_nothing_changes_by_it(
    wide: Path, tmp_path: Path
) -> None:
    assert half_type(open_checkpoint(wide)) == "BF16"
    tied = folded.build("qwen2").model.half()
    tied.save_pretrained(tmp_path / "tied")
    assert half_type(open_checkpoint(tmp_path / "tied")) == "F16"
    folded.build("t5").model.bfloat16().save_pretrained(tmp_path / "t5")
    folded.build("llama").model.save_pretrained(tmp_path / "float32")
    assert half_type(open_checkpoint(tmp_path / "t5")) is None
    assert half_type(open_checkpoint(tmp_path / "float32")) is None


def test_a_fit_on_halves_has_the_bytes_of_one_on_float32(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "multiplies_bfloat16", lambda _: True)
    loaded: list[bool] = []

    def noted(*args: Any, halves: bool = False, **options: Any) -> Any:
        loaded.append(halves)
        return open_model(*args, halves=halves, **options)

    monkeypatch.setattr(model_loading, "open_model", noted)
    batches = batches_for(open_model(wide))
    fitted(wide, tmp_path / "halves", 2, batches=batches, kl_steps=3)
    monkeypatch.setattr(fitting, "half_type", lambda _: None)
    fitted(wide, tmp_path / "float32", 2, batches=batches, kl_steps=3)
    assert loaded == [True, False]
    assert digests(tmp_path / "halves") == digests(tmp_path / "float32")


@pytest.mark.parametrize("reduced", [False, True])
def test_weights_on_the_disk_change_nothing(
    reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def precision(_: Any, device: torch.device) -> Any:
        asked.append(device.type)
        return partial(torch.autocast, "cpu", torch.bfloat16) if reduced else nullcontext

    monkeypatch.setattr(model_loading, "precision_of", precision)
    source = folded.build("qwen2").save(tmp_path / "source")
    batches = batches_for(open_model(source))
    fitted(source, tmp_path / "memory")
    monkeypatch.setattr(model_loading, "free_memory", lambda device: 0)
    fitted(source, tmp_path / "disk", batches=batches)
    assert digests(tmp_path / "memory") == digests(tmp_path / "disk")
    assert set(asked) == {"cpu"}, (
        "weights on the disk are on the device `meta`, which multiplies nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kl_steps", "killed_at", "finished"), [(0, "layer 2: gradient steps", 1), (60, "step 2 of", 3)]
)
def test_killed_it_goes_on_to_the_bytes_of_a_straight_run(
    kl_steps: int, killed_at: str, finished: int, small: Path, text: Path, tmp_path: Path
) -> None:
    """Layers that are done are not made again, whatever the last stage is to do now, and leave
    no trace in the end.
    """
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def options(kl_steps: int) -> ConversionOptions:
        return ConversionOptions(
            calibration=CalibrationOptions(source=text, tokens=1500, steps=3, kl_steps=kl_steps)
        )

    done = convert_checkpoint(small, straight, 3, options(8)).calibration
    assert done is not None
    assert done.kl is not None
    assert done.kl.after < done.kl.before

    def killed(progress: Any) -> None:
        if progress.detail.startswith(killed_at):
            die()

    status, problem = in_child(
        lambda: convert_checkpoint(small, resumed, 3, options(kl_steps), on_layer=killed)
    )
    assert (status, problem) == (-signal.SIGKILL, "")
    assert not resumed.exists()
    kept = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / ".resumed.gqa-merging").glob("layer-*")
    }
    assert len(kept) == finished

    def look(_: Any) -> None:
        assert {path: path.stat().st_mtime_ns for path in kept} == kept

    result = convert_checkpoint(small, resumed, 3, options(8), on_layer=look)
    assert result.calibration == done
    assert digests(straight) == digests(resumed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "straight"]
    assert set(result.merge_error) == {
        f"model.layers.{layer}.self_attn.output" for layer in range(3)
    }


def test_gradient_steps_that_do_not_help_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folded.build("llama").save(tmp_path / "source")
    without, *_ = fitted(source, tmp_path / "without", steps=0)

    monkeypatch.setattr(one_layer, "RATE", 100.0)
    spoilt, *_ = fitted(source, tmp_path / "spoilt", steps=4)
    assert [output(record) for record in spoilt] == [output(record) for record in without]
    assert digests(tmp_path / "spoilt") == digests(tmp_path / "without")


def test_gates_beside_queries_stay_as_they_are(tmp_path: Path) -> None:
    case = folded.build("qwen3_next")
    fitted(case.save(tmp_path / "source"), tmp_path / "out", kl_steps=2)
    before, after = (model.state_dict() for model in (case.model, case.load(tmp_path / "out")))
    names = [name for name in before if name.endswith("self_attn.q_proj.weight")]
    assert names
    for name in names:
        (queries, gates), (new_queries, new_gates) = (
            weights[name].unflatten(0, (folded.HEADS, 2, -1)).unbind(1)
            for weights in (before, after)
        )
        assert torch.equal(gates, new_gates)
        assert not torch.equal(queries, new_queries)


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    case = folded.build("llama")
    with torch.no_grad():
        case.model.model.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    source = case.save(tmp_path / "source")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.self_attn\.o_proj\.weight"):
        fitted(source, tmp_path / "out")


def test_a_type_without_classes_can_be_factored_only(text: Path, tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    options = ConversionOptions(calibration=CalibrationOptions(source=text))
    with pytest.raises(
        OptionError, match=r"transformers has no class of type chatglm.*--method factor"
    ):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, options)
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_by_layer(tmp_path: Path) -> None:
    """Of 12 layers, counted by all tensors that are alive when one has been merged."""
    sizes = {
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_hidden_layers": 12,
        "intermediate_size": 32,
    }
    model = LlamaForCausalLM(LlamaConfig(hidden_size=48, vocab_size=VOCAB, **sizes))
    model.save_pretrained(tmp_path / "source")
    alive: list[int] = []

    def count(progress: FitProgress) -> None:
        if progress.layer is not None:
            gc.collect()
            storages = {
                each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                for each in gc.get_objects()
                if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu"
            }
            alive.append(sum(storages.values()))

    plan = plan_of(tmp_path / "source")
    batches = [{"input_ids": torch.randint(3, VOCAB, (4, 64))} for _ in range(4)]
    options = FitOptions(method=plan.merge_method, steps=2, seed=0, validation=1)
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        fit_layers(plan, store, open_model(tmp_path / "source"), batches, options, count)
    assert len(alive) == 12
    assert max(alive[2:]) <= 1.01 * max(alive[:2])
