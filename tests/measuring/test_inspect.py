"""What `inspect` states is what direct computations give, and heads that were planted equal are found."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli import app
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import DataError, GroupsError, MissingExtraError, NonFiniteError, OptionError, OutputError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import FAMILIES
from gqa_convert.measuring.inspect.pairs import pair_errors
from gqa_convert.measuring.inspect.quick_fit import STEPS
from gqa_convert.measuring.inspect.run import inspect_checkpoint, recommend
from gqa_convert.measuring.results.schemas import GroupsLoss, LossAfterFit
from gqa_convert.merging.folding.constraints import FoldingConstraints, find_folding_constraints
from gqa_convert.merging.folding.fitted_error import fitted_errors
from gqa_convert.merging.folding.heads import Heads, LayerTensors
from gqa_convert.merging.folding.merge import Moments, merge_layer
from gqa_convert.text.calibration import calibration_batches
from tests.helpers.checkpoints import WIDTH, llama_arrays, write_llama
from tests.helpers.command_line import assert_mistake, loaded_after, run
from tests.helpers.data_helpers import span_tokenizer
from tests.helpers.tiny import HEADS, make_checkpoint, randomise

LENGTH = 64
TOKENS = 40 * LENGTH
FIRST_WORD = 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No tokenizer, no text; in layer 1 the heads 4 and 7 are equal."""
    arrays = llama_arrays(layers=3)
    for role in "kv":
        rows = arrays[f"model.layers.1.self_attn.{role}_proj.weight"].reshape(HEADS, WIDTH, -1)
        rows[7] = rows[4]
    return write_llama(tmp_path_factory.mktemp("inspect") / "weights", arrays=arrays, config={"num_hidden_layers": 3})


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama whose 12 K/V heads are 3, each four times; and text that it wrote, so that no other model predicts that
    better.
    """
    folder = tmp_path_factory.mktemp("inspect") / "planted"
    make_checkpoint("llama", folder, tied=3)
    span_tokenizer(0).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    written = written_by(model, TOKENS // LENGTH, seed=3)
    text = folder.parent / "text.txt"
    text.write_text(" ".join(f"w{token - FIRST_WORD}" for token in written.flatten().tolist()))
    return folder, text


def written_by(model: Any, blocks: int, seed: int) -> Tensor:
    """Blocks of tokens drawn from the model's own predictions."""
    generator = torch.Generator().manual_seed(seed)
    written = torch.full((blocks, 1), FIRST_WORD)
    with torch.inference_mode():
        for _ in range(LENGTH - 1):
            chances = model(input_ids=written).logits[:, -1, FIRST_WORD:].softmax(-1)
            written = torch.cat([written, FIRST_WORD + torch.multinomial(chances, 1, generator=generator)], dim=1)
    return written


@pytest.fixture(scope="module")
def inspected(planted: tuple[Path, Path]) -> dict[str, Any]:
    folder, text = planted
    return inspect_checkpoint(
        folder, calibration=str(text), calibration_tokens=TOKENS, max_loss_increase=0.01
    ).as_json()


def blocks_of(planted: tuple[Path, Path]) -> tuple[Tensor, Tensor]:
    """The blocks for the moments, and the last fifth."""
    batches = calibration_batches(planted[0], str(planted[1]), TOKENS, seed=0).batches
    blocks = torch.cat([batch["input_ids"] for batch in batches])
    assert blocks.shape == (TOKENS // LENGTH, LENGTH)
    return blocks[: -len(blocks) // 5], blocks[-len(blocks) // 5 :]


def moments_of(model: Any, blocks: Tensor) -> list[np.ndarray[Any, Any]]:
    """E[x x^T] of each attention layer's input and a 1 behind it, damped by 1% of the mean of its diagonal."""
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model(input_ids=blocks)
    for hook in hooks:
        hook.remove()
    found = []
    for states in seen:
        rows = states.flatten(0, 1).double().numpy()
        moment = rows.T @ rows / len(rows)
        moment += 0.01 * np.diag(moment).mean() * np.eye(len(moment))
        whole = np.ones((len(moment) + 1, len(moment) + 1))
        whole[:-1, :-1], whole[-1, :-1], whole[:-1, -1] = moment, rows.mean(0), rows.mean(0)
        found.append(whole)
    return found


def roots(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


def direct_errors(attention: Any, moment: np.ndarray[Any, Any], groups: int) -> tuple[float, float]:
    """By the eigenvalues that a merge drops: nothing is merged here."""
    moment = moment[:-1, :-1]  # there are no biases
    queries, keys, values = (
        getattr(attention, f"{role}_proj").weight.detach().double().numpy().reshape(HEADS, -1, len(moment))
        for role in "qkv"
    )
    width = keys.shape[1]
    columns = attention.o_proj.weight.detach().double().numpy().reshape(-1, HEADS, width).transpose(1, 0, 2)
    lost, total = np.zeros(2), np.zeros(2)
    size = HEADS // groups
    for first in range(0, HEADS, size):
        own = range(first, first + size)
        for pair in range(width // 2):
            channel = np.stack([keys[head, pair] + 1j * keys[head, pair + width // 2] for head in own])
            asked = np.stack([queries[head, pair] + 1j * queries[head, pair + width // 2] for head in own])
            strength = np.sqrt(np.einsum("md,de,me->m", asked, moment, asked.conj()).real)
            kept = np.linalg.eigvalsh(channel @ moment @ channel.conj().T * np.outer(strength, strength))
            lost[0] += kept[:-1].sum()
            total[0] += kept.sum()
        weighed = np.concatenate([roots(columns[head].T @ columns[head]) @ values[head] for head in own])
        kept = np.linalg.eigvalsh(weighed @ moment @ weighed.T)
        lost[1] += kept[:-width].sum()
        total[1] += kept.sum()
    keys_error, values_error = np.sqrt(lost.clip(0) / total)
    return float(keys_error), float(values_error)


def test_errors_are_those_of_the_dropped_eigenvalues(planted: tuple[Path, Path], inspected: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(planted[0], dtype=torch.float32).eval()
    moments = moments_of(model, blocks_of(planted)[0])
    assert inspected["groups"] == [1, 2, 3, 4, 6]
    assert [layer["label"] for layer in inspected["layers"]] == ["0", "1"]
    for layer, module, moment in zip(inspected["layers"], model.model.layers, moments, strict=True):
        for error in layer["errors"]:
            expected = direct_errors(module.self_attn, moment, error["groups"])
            assert (error["keys"], error["values"]) == pytest.approx(expected, rel=1e-4, abs=2e-5)
        by_groups = {error["groups"]: max(error["keys"], error["values"]) for error in layer["errors"]}
        assert by_groups[3] < 1e-4
        assert by_groups[6] < 1e-4
        assert min(by_groups[1], by_groups[2], by_groups[4]) > 0.05  # no multiple of 3, or fewer


def test_the_planted_number_is_recommended(planted: tuple[Path, Path], inspected: dict[str, Any]) -> None:
    increases = {each["groups"]: each["increase"] for each in inspected["loss"]["by_groups"]}
    predicted = {each["groups"]: each["after_fit"] for each in inspected["loss"]["by_groups"]}
    for groups in (3, 6):
        assert abs(increases[groups]) < 1e-4
        assert 0 <= predicted[groups]["low"] <= predicted[groups]["increase"] <= predicted[groups]["high"] < 1e-4
    assert min(increases[1], increases[2]) > 0.02
    advice = inspected["recommendation"]
    assert advice["groups"] == 3
    assert f"convert {planted[0]} planted-gqa3 --groups 3 --calibration {planted[1]}" in advice["command"]


def test_losses_are_those_of_a_model_with_merged_weights(planted: tuple[Path, Path], inspected: dict[str, Any]) -> None:
    """The merged tensors are joined and loaded; nothing is replaced while a model runs."""
    model = AutoModelForCausalLM.from_pretrained(planted[0], dtype=torch.float32).eval()
    text, held_out = blocks_of(planted)
    assert inspected["calibration"]["held_out_blocks"] == len(held_out) == 8
    assert inspected["loss"]["tokens"] == 8 * (LENGTH - 1)
    assert inspected["loss"]["source"] == pytest.approx(loss_of(model, held_out), rel=1e-5)
    moments = moments_of(model, text)
    finder = AttentionFinder(open_checkpoint(planted[0]), FAMILIES["llama"])
    for groups in (1, 4):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for layer, moment in zip(finder.layers, moments, strict=True):
            parts = LayerTensors(finder, layer)
            tensors = {name: state[name].numpy() for name in parts.names}
            merged = merge_layer(
                parts.cut(tensors), groups, find_folding_constraints(finder, layer), Moments(moment, moment)
            )
            joined = parts.repeated(parts.join(merged, tensors, groups), groups)
            state |= {name: torch.from_numpy(array) for name, array in joined.items()}
        other = AutoModelForCausalLM.from_config(model.config).eval()
        other.load_state_dict(state)
        stated = next(each for each in inspected["loss"]["by_groups"] if each["groups"] == groups)
        assert stated["loss"] == pytest.approx(loss_of(other, held_out), rel=1e-4)
        assert stated["increase"] == pytest.approx(stated["loss"] - inspected["loss"]["source"])


def loss_of(model: Any, blocks: Tensor) -> float:
    with torch.inference_mode():
        return float(model(input_ids=blocks, labels=blocks).loss)


def test_the_interval_contains_the_loss_of_a_conversion(
    planted: tuple[Path, Path], inspected: dict[str, Any], tmp_path: Path
) -> None:
    """Text that the source writes anew; 60 steps, since more gain little on so little calibration text."""
    folder, text = planted
    out = tmp_path / "out"
    convert_checkpoint(folder, out, 1, calibration=str(text), calibration_tokens=TOKENS, fit_steps=60)
    source, made = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (folder, out))
    fresh = written_by(source, 24, seed=4)
    increase = loss_of(made, fresh) - loss_of(source, fresh)
    stated = next(each for each in inspected["loss"]["by_groups"] if each["groups"] == 1)
    assert stated["after_fit"]["low"] < increase < stated["after_fit"]["high"]
    assert 0.05 < increase < stated["increase"]


def random_heads(
    seed: int = 0,
    heads: int = 5,
    ratio: int = 2,
    width: int = 6,
    value_head_dim: int = 4,
    inputs: int = 9,
    out: int = 7,
) -> Heads:
    random = np.random.default_rng(seed)
    return Heads(
        random.standard_normal((heads, ratio, width, inputs)),
        random.standard_normal((heads, width, inputs)),
        random.standard_normal((heads, value_head_dim, inputs)),
        random.standard_normal((heads, ratio, out, value_head_dim)),
        None,
    )


def random_moment(seed: int, inputs: int = 9) -> np.ndarray[Any, Any]:
    rows = np.random.default_rng(seed).standard_normal((40, inputs)) + 0.7
    rows[:, -1] = 1
    return np.asarray(rows.T @ rows / len(rows))


TURNING = {"none": [], "some": [(0, 2), (1, 3)], "all": [(0, 3), (1, 4), (2, 5)]}


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("turning", TURNING)
def test_a_pair_loses_what_it_loses_without_the_others(turning: str, measured: bool) -> None:
    """Cross-attention has inputs of two kinds."""
    heads = random_heads()
    rows = np.array(TURNING[turning], int).reshape(-1, 2).T
    moments = Moments(random_moment(1), random_moment(2)) if measured else None
    reasons = [(None, None), ("keys are normed", None), (None, "values are clipped")]
    for constraints in (FoldingConstraints((rows[0], rows[1]), *each) for each in reasons):
        found = pair_errors(heads, constraints, moments)
        assert len(found) == 10
        for pair in ((0, 1), (1, 4)):
            fields = {role: getattr(heads, role)[list(pair)] for role in ("queries", "keys", "values", "outputs")}
            two = replace(heads, **fields)
            expected = fitted_errors(two, merge_layer(two, 1, constraints, moments), constraints, moments)
            assert found[pair] == pytest.approx(expected, rel=1e-6)


def test_heads_that_are_equal_are_the_cheapest_pair(weights: Path) -> None:
    result = inspect_checkpoint(weights).as_json()
    assert (result["loss"], result["recommendation"], result["calibration"]) == (None, None, None)
    for number, layer in enumerate(result["layers"]):
        first, *others = layer["cheapest_pairs"]
        assert len(others) == 2
        assert all(pair["error"] > 0.1 for pair in others)
        assert (first["heads"] == [4, 7] and first["error"] < 1e-6) if number == 1 else first["error"] > 0.1
        assert first["error"] == pytest.approx(np.sqrt((first["keys"] ** 2 + first["values"] ** 2) / 2))


def test_pairs_on_text_are_within_planted_groups(inspected: dict[str, Any]) -> None:
    for layer in inspected["layers"]:
        for pair in layer["cheapest_pairs"]:
            assert pair["heads"][0] // 4 == pair["heads"][1] // 4
            assert pair["error"] < 1e-4


def test_weights_alone_need_no_torch(weights: Path) -> None:
    code = (
        "from gqa_convert.measuring.inspect.run import inspect_checkpoint\ninspect_checkpoint(sys.argv[1], groups=[3])"
    )
    assert not loaded_after(code, str(weights)) & {"torch", "transformers", "matplotlib", "greenlet"}


def test_t5_is_inspected_in_self_and_cross_attention(tmp_path: Path) -> None:
    config = T5Config(
        d_model=24,
        d_kv=4,
        d_ff=40,
        num_layers=2,
        num_heads=12,
        vocab_size=620,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
    )
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    randomise(model)
    with torch.no_grad():
        for block in model.decoder.block:
            for attention in (block.layer[0].SelfAttention, block.layer[1].EncDecAttention):
                for projection in (attention.k, attention.v):
                    rows = projection.weight.unflatten(0, (4, 3, 4))
                    rows.copy_(rows[:, :1].expand_as(rows).clone())
    model.save_pretrained(tmp_path / "t5")
    span_tokenizer().save_pretrained(tmp_path / "t5")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number * number % 499}" for number in range(3000)))
    result = inspect_checkpoint(
        tmp_path / "t5", calibration=str(text), calibration_tokens=2600, groups=[4, 1, 4], seed=5
    ).as_json()
    assert result["groups"] == [1, 4]
    assert [layer["label"] for layer in result["layers"]] == ["0", "0 cross", "1", "1 cross"]
    for layer in result["layers"]:
        lost, kept = layer["errors"]
        assert min(lost["keys"], lost["values"]) > 0.1
        assert max(kept["keys"], kept["values"]) < 1e-4
    batches = calibration_batches(tmp_path / "t5", str(text), 2600, seed=5, batch_tokens=2048).batches
    assert len(batches[-1]["input_ids"]) == 1
    with torch.inference_mode():
        expected = float(model(**batches[-1]).loss)
    assert result["calibration"]["held_out_blocks"] == 1
    assert result["loss"]["source"] == pytest.approx(expected, rel=1e-5)
    assert result["loss"]["by_groups"][1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["loss"]["by_groups"][0]["loss"] != pytest.approx(expected, rel=1e-5)


def test_default_groups_are_divisors_and_at_most_six(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24, "num_hidden_layers": 1}
    source = write_llama(tmp_path / "wide", arrays=llama_arrays(layers=1, heads=24), config=heads)
    assert inspect_checkpoint(source).groups == (1, 2, 3, 6, 8, 12)


def test_recommendations() -> None:
    losses = [
        GroupsLoss(groups=2, loss=3.0, increase=0.5),
        GroupsLoss(groups=4, loss=None, increase=None),
        GroupsLoss(groups=6, loss=2.7, increase=0.2),
    ]
    options = {"--calibration": "my text.txt", "--revision": None}
    found = recommend(losses, 0.2, "org/model", options, encoder=True)
    assert found.groups == 6
    assert found.command == "gqa-convert convert org/model model-gqa6 --groups 6 --calibration 'my text.txt' --encoder"
    none = recommend(losses, 0.1, "org/model", options)
    assert (none.groups, none.command) == (None, None)
    after = LossAfterFit(increase=0.08, low=0.05, high=0.13)
    predicted = [losses[0].model_copy(update={"after_fit": after}), *losses[1:]]
    assert recommend(predicted, 0.13, "org/model", options).groups == 2
    assert recommend(predicted, 0.2, "org/model", options).reason.endswith(
        "+0.080 (0.050 to 0.130) predicted after fit"
    )
    refused = recommend(predicted, 0.12, "org/model", options)
    assert refused.groups is None
    assert "N = 2 comes nearest with +0.080 (0.050 to 0.130)" in refused.reason
    assert "none of N = 2, 4, 6 stays within 0.1" in none.reason or ""
    assert "N = 6 comes nearest with +0.200" in none.reason or ""
    assert "no loss is finite" in (recommend(losses[1:2], 0.1, "org/model", options).reason or "")


def test_mistakes(weights: Path, planted: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: type[Exception], words: str, source: Path = weights, **options: Any) -> None:
        with pytest.raises(kind, match=words):
            inspect_checkpoint(source, **options)

    refused(GroupsError, "--groups 5 does not fit", groups=[5])
    refused(GroupsError, "--groups 12 merges none of the 12", groups=[3, 12])
    refused(OptionError, "--groups names no number", groups=[])
    refused(OptionError, "--calibration-tokens 9 without text", calibration_tokens=9)
    refused(OptionError, "--max-loss-increase 0.2 without text", max_loss_increase=0.2)
    refused(OptionError, "--max-loss-increase -1 is not a loss", calibration="x", max_loss_increase=-1)
    refused(OptionError, "ends in '.gif'", plot=tmp_path / "a.gif")
    refused(OptionError, "there is no folder", plot=tmp_path / "none" / "a.png")
    refused(DataError, "one block and none left", planted[0], calibration=str(planted[1]), calibration_tokens=LENGTH)
    alone = write_llama(
        tmp_path / "mqa",
        arrays=llama_arrays(layers=1, heads=1),
        config={
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
        },
    )
    refused(GroupsError, "there is nothing to merge", alone)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(MissingExtraError, r"pip install 'gqa-convert\[plot\]'", plot=tmp_path / "a.png")


def test_a_source_that_yields_nan(planted: tuple[Path, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(planted[0])
    model.model.embed_tokens.weight.data[FIRST_WORD:] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    span_tokenizer(0).save_pretrained(tmp_path / "broken")
    with pytest.raises(
        NonFiniteError, match=r"yields NaN or Inf at model\.layers\.0\.self_attn on the calibration text"
    ):
        inspect_checkpoint(tmp_path / "broken", calibration=str(planted[1]), calibration_tokens=640)


def test_chatglm_runs_in_no_class_of_transformers(tmp_path: Path) -> None:
    from tests.helpers.chatglm import write_source

    write_source(tmp_path / "chatglm")
    with pytest.raises(OptionError, match="no class of type chatglm: leave it out"):
        inspect_checkpoint(tmp_path / "chatglm", calibration="text.txt")


def test_the_picture_is_no_blank(weights: Path, tmp_path: Path) -> None:
    import matplotlib.image as matplotlib_image

    result = run("inspect", weights, "--plot", tmp_path / "a.png", "--groups", "3,1")
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "a.png") in result.stdout
    picture = matplotlib_image.imread(tmp_path / "a.png")
    for kind in ("png", "svg", "pdf"):
        path = tmp_path / f"again.{kind}"
        inspect_checkpoint(weights, groups=[3], plot=path)
        inspect_checkpoint(weights, groups=[3], plot=path)  # its own it may replace
        path.write_bytes(b"a photograph")
        with pytest.raises(OutputError, match="did not draw it"):
            inspect_checkpoint(weights, groups=[3], plot=path)
        assert path.read_bytes() == b"a photograph"
    assert picture.shape[0] > 200
    assert picture.shape[1] > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50
    assert np.median(picture[..., :3]) > 0.4  # light


def test_the_command_for_people_and_for_scripts(
    weights: Path, planted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    people = run("inspect", weights, "-n", "1,4")
    assert people.returncode == 0
    assert people.stderr == ""
    for words in ("12 K/V heads in 3 attention layers", "K1", "V4", "4+7 0.00", "name text with --calibration"):
        assert words in people.stdout
    arguments = ("inspect", planted[0], "-c", planted[1], "--calibration-tokens", TOKENS, "-n", "2,3", "--json")
    app([str(argument) for argument in arguments], standalone_mode=False)
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result.keys() == {
        "format_version",
        "source",
        "model_type",
        "heads",
        "kv_heads",
        "groups",
        "calibration",
        "layers",
        "loss",
        "max_loss_increase",
        "recommendation",
        "plot",
    }
    assert result["layers"][0].keys() == {
        "module",
        "label",
        "place",
        "kv_heads",
        "errors",
        "cheapest_pairs",
        "key_barrier",
        "value_barrier",
    }
    assert result["layers"][0]["errors"][1].keys() == {"groups", "keys", "values"}
    assert result["layers"][0]["cheapest_pairs"][0].keys() == {"heads", "error", "keys", "values"}
    assert result["loss"].keys() == {"source", "tokens", "by_groups", "quick_fit"}
    assert result["loss"]["by_groups"][0].keys() == {"groups", "loss", "increase", "after_fit"}
    assert result["loss"]["by_groups"][0]["after_fit"].keys() == {"increase", "low", "high"}
    assert result["loss"]["quick_fit"] == {
        "modules": [f"model.layers.{number}.self_attn" for number in range(2)],
        "groups": [2, 3],
        "steps": STEPS,
        "tokens": 8 * LENGTH,
        "last_stage": True,
    }
    assert (result["max_loss_increase"], result["plot"]) == (0.1, None)
    app(
        ["inspect", str(planted[0]), "-c", str(planted[1]), "--calibration-tokens", "640", "-n", "3"],
        standalone_mode=False,
    )
    printed = capsys.readouterr()
    assert printed.err == ""
    for words in (
        "predicted loss after fit",
        "+0.000 (0.000 to 0.000)",
        "closed form alone",
        "recommended",
        "next     gqa-convert convert",
    ):
        assert words in printed.out
    assert_mistake(run("inspect", weights, "-n", "1,x"), "--groups '1,x' is not a list of numbers")
    assert_mistake(run("inspect", weights, "-n", "5"), "choose one of 1, 2, 3, 4, 6, 12")


def test_the_help_has_examples() -> None:
    shown = run("inspect", "--help").stdout
    assert "gqa-convert inspect ./Llama-2-7b --calibration text.txt" in shown
    assert "predicts the loss that remains after convert --calibration" in " ".join(shown.split())
