"""A budget of K/V cache goes to the layers that need it: the optimisation, the measured costs, and the whole command."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli.console.budget import picture
from gqa_convert.cli.options import cache_budget, check_one_choice_of_groups
from gqa_convert.conversion.fit.calibrated import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import GroupsError, OptionError, OutputError
from gqa_convert.measuring.budget import divergences, layer_merging
from gqa_convert.measuring.budget import run as budget_run
from gqa_convert.measuring.budget.allocation import (
    LayerCosts,
    exchanges,
    largest_uniform,
    least_sum,
    least_sum_of_roots,
)
from gqa_convert.measuring.budget.amount import KVBudget
from gqa_convert.measuring.budget.candidates import CandidateSearch, measure_candidates
from gqa_convert.measuring.budget.choice import BudgetChoice, Candidate, Rule
from gqa_convert.measuring.budget.kept import KeptDivergences
from gqa_convert.measuring.budget.layer_merging import ClosedForm
from gqa_convert.measuring.budget.run import choose_groups
from gqa_convert.measuring.inspect import quick_fit
from gqa_convert.measuring.next_command import budget_command
from gqa_convert.verify import verify_checkpoint
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.data_helpers import DEMO
from tests.helpers.tiny import HEADS, make_checkpoint
from tests.helpers.verification import failed

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

FREE = (1, 3)
"""The layers whose 12 K/V heads are multiples of 3 heads: `factor` merges them without loss, and a mean does not."""
FACTORS = torch.tensor([1.0, -0.5, 2.0, 1.5])[:, None, None]
CHOSEN = [12, 3, 12, 3]
SHARE = "62.5%"
"""What `CHOSEN` takes."""
HEAD_BYTES = 2 * 8 * 4  # keys and values, head_dim, float32
OPTIONS = ("--calibration-tokens", "640", "--calibration-length", "64", "--device", "cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers, two of which merge without loss, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("budget") / "source"
    make_checkpoint("llama", folder, head_dim=8, intermediate_size=256, num_hidden_layers=4, vocab_size=2048)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for number in FREE:
        attention = model.model.layers[number].self_attn
        for projection in (attention.k_proj, attention.v_proj):
            rows = projection.weight.data.reshape(3, 4, 8, -1)
            rows[:] = rows[:, :1] * FACTORS
    model.save_pretrained(folder, max_shard_size="1MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    path = source.parent / "text.txt"
    path.write_text(Path(json.__file__).read_text())
    return path


@pytest.fixture(scope="module")
def converted(source: Path, text: Path) -> tuple[Path, dict[str, Any], str]:
    """The result of the command, its JSON object, and what it printed on stderr."""
    out = source.parent / "out"
    done = run("convert", source, out, "--kv-budget", SHARE, "-c", text, "-m", "factor", *OPTIONS, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


def _random_layers(generator: random.Random) -> list[LayerCosts]:
    """Layers that may differ in their heads, in their head_dim and in how costs depend on the number of heads."""
    return [
        LayerCosts(
            generator.choice((2, 4, 6)),
            {
                groups: generator.choice((0.0, generator.random(), math.inf))
                for groups in (1, 2, 4, 8)[: generator.randint(1, 4)]
            },
        )
        for _ in range(generator.randint(1, 4))
    ]


def test_the_optimisation_finds_what_trying_everything_finds() -> None:
    generator = random.Random(0)
    for _ in range(300):
        layers = _random_layers(generator)
        least = sum(layer.head_bytes for layer in layers)
        limit = generator.randint(least, 4 * least)

        def taken(counts: tuple[int, ...], layers: list[LayerCosts] = layers) -> int:
            return sum(layer.head_bytes * groups for layer, groups in zip(layers, counts, strict=True))

        def cost(counts: tuple[int, ...], power: float, layers: list[LayerCosts] = layers) -> float:
            return sum(layer.by_groups[groups] ** power for layer, groups in zip(layers, counts, strict=True))

        possible = [each for each in product(*(layer.by_groups for layer in layers)) if taken(each) <= limit]
        for choose, power in ((least_sum, 1), (least_sum_of_roots, 0.5)):
            chosen = choose(layers, limit)
            assert chosen in possible
            assert cost(chosen, power) == pytest.approx(min(cost(each, power) for each in possible))
        assert largest_uniform(layers, limit) == max(each for each in possible if len(set(each)) == 1)
        with pytest.raises(ValueError, match="do not suffice"):
            least_sum(layers, least - 1)


def test_exchanges_are_all_lists_with_one_raised_and_at_most_one_lowered() -> None:
    generator = random.Random(1)
    for _ in range(100):
        layers = [
            LayerCosts(generator.choice((2, 4)), {groups: generator.random() for groups in (1, 2, 4)}) for _ in range(3)
        ]
        limit = generator.randint(12, 48)
        lists = [
            each
            for each in product(*(layer.by_groups for layer in layers))
            if sum(layer.head_bytes * groups for layer, groups in zip(layers, each, strict=True)) <= limit
        ]
        if not lists:
            continue
        now = generator.choice(lists)

        def is_exchange(each: tuple[int, ...], now: tuple[int, ...] = now) -> bool:
            more, fewer = (sum(sign * a > sign * b for a, b in zip(each, now, strict=True)) for sign in (1, -1))
            return more == 1 and fewer <= 1

        def cost(each: tuple[int, ...], layers: list[LayerCosts] = layers) -> float:
            return sum(layer.by_groups[groups] for layer, groups in zip(layers, each, strict=True))

        found = exchanges(layers, now, limit)
        assert sorted(found) == sorted(filter(is_exchange, lists))
        assert [cost(each) for each in found] == pytest.approx(sorted(map(cost, found)))


def test_exchanges_are_tried_until_none_is_better() -> None:
    """Layers interact: the sum of costs prefers the first list, and two exchanges lead to the best one."""
    layers = [LayerCosts(1, {1: 1.0, 2: 0.5, 4: 0.0}) for _ in range(4)]
    best = (4, 4, 1, 1)
    passes: list[list[tuple[int, ...]]] = []

    def measure(lists: Sequence[tuple[int, ...]]) -> list[float]:
        passes.append(list(lists))
        return [float(sum(abs(a - b) for a, b in zip(each, best, strict=True))) for each in lists]

    search = CandidateSearch(layers, 10)
    measure_candidates(search, measure, rounds=9)
    assert min(search.found, key=lambda counts: search.found[counts][1]) == best
    measured = [each for lists in passes for each in lists]
    assert len(set(measured)) == len(measured), "nothing twice"
    assert len(passes) < 10, "it ends by itself"
    assert search.found[best][0] is Rule.EXCHANGES
    once = CandidateSearch(layers, 10)
    measure_candidates(once, measure, rounds=0)
    assert Rule.EXCHANGES not in {rule for rule, _ in once.found.values()}


def test_for_fit_layers_are_fitted_and_each_only_once(
    source: Path,
    text: Path,
    tmp_path: Path,
    converted: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the second pass over the layers, and repeated."""
    monkeypatch.setattr(divergences, "COPIES", 8)
    monkeypatch.setattr(quick_fit, "STEPS", 2)
    made, fits, left = layer_merging.quick_fitting, list[tuple[str, int]](), [12]

    def counted(module: Any, work: Any, groups: int, *others: Any, **options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        fits.append((module.name, groups))
        return made(module, work, groups, *others, **options)

    def choose() -> BudgetChoice:
        kept, options = KeptDivergences(tmp_path / "out"), CalibrationOptions(str(text), 640, 64, device="cpu")
        budget = KVBudget(SHARE, share=Fraction(5, 8))
        return choose_groups(source, tmp_path / "out", budget, options, kept=kept)

    monkeypatch.setattr(layer_merging, "quick_fitting", counted)
    with pytest.raises(KeyboardInterrupt):
        choose()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.gqa-budget.json", ".out.short-fits.gqa-merging"]
    left[0] = 99
    choice = choose()
    assert len(fits) == len(set(fits)) == 20
    assert choice.by_short_fits
    assert choice.as_json()["merged_by"] == "short fits"
    assert choice.groups == CHOSEN
    closed = {layer["module"]: layer["kl"] for layer in converted[1]["budget"]["layers"]}
    for number, (module, fitted) in enumerate(choice.costs.items()):
        assert (fitted[3] < 1e-5) == (number in FREE)
        if number in FREE:  # four heads of which three would do: gradient steps find what the closed form does not
            assert fitted[4] < closed[module]["4"] / 5
    assert [path.name for path in tmp_path.iterdir()] == [".out.gqa-budget.json"]


def test_roots_prefer_one_large_cost_to_several_small_ones() -> None:
    layers = [LayerCosts(1, {1: 0.09, 2: 0.0}), LayerCosts(1, {1: 0.04, 2: 0.0}), LayerCosts(2, {1: 0.1, 2: 0.0})]
    assert least_sum(layers, 6) == (2, 2, 1)
    layers[2] = LayerCosts(2, {1: 0.16, 2: 0.0})
    assert least_sum(layers, 6) == (1, 1, 2)
    assert least_sum_of_roots(layers, 6) == (2, 2, 1)


def test_the_budget_is_taken_from_the_layers_that_merge_for_free(
    source: Path, converted: tuple[Path, dict[str, Any], str]
) -> None:
    out, printed, notes = converted
    assert printed["groups"] == json.loads((out / "gqa_conversion.json").read_text())["groups"] == CHOSEN
    budget = printed["budget"]
    assert printed["kv_bytes_per_token"] == {"before": 48 * HEAD_BYTES, "after": 30 * HEAD_BYTES}
    assert budget["limit_kv_bytes_per_token"] == budget["kv_bytes_per_token"] == 30 * HEAD_BYTES
    by_rule = {each["rule"]: each for each in budget["candidates"]}
    assert by_rule["uniform"]["groups"] == [6] * 4
    assert by_rule["least sum of divergences"]["groups"] == CHOSEN
    assert by_rule["least sum of divergences"]["kl"] < 1e-5
    assert by_rule["uniform"]["kl"] > 1e-3
    for number, layer in enumerate(budget["layers"]):
        assert layer["module"] == f"model.layers.{number}.self_attn"
        assert list(map(int, layer["kl"])) == [1, 2, 3, 4, 6]
        assert (layer["kl"]["3"] < 1e-5) == (number in FREE)
        assert layer["kl"]["1"] > 1e-3
    assert "62.5%" in notes
    assert "--groups 12,3,12,3, 1,920 bytes" in notes
    assert "for N = 6 in every layer; 0.0000 for the least sum of divergences" in notes
    report = verify_checkpoint(out, source)
    assert report.passed, failed(report)


def test_the_chosen_one_diverges_least_and_passes_do_not_matter(
    source: Path,
    text: Path,
    tmp_path: Path,
    converted: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers with other costs; measured in three passes rather than in one, each layer costs the same."""
    monkeypatch.setattr(divergences, "COPIES", 7)
    seen: list[tuple[str, int, int]] = []
    choice = choose_groups(
        source,
        tmp_path / "out",
        KVBudget("1000", nbytes=1000),
        CalibrationOptions(str(text), 640, 64, device="cpu"),
        method="factor",
        progress=lambda *step: seen.append(step),
    )
    assert choice.chosen.kv_bytes_per_token <= choice.limit == 1000
    assert choice.chosen.kl == min(each.kl for each in choice.candidates)
    assert choice.candidates[0].groups == (3,) * 4
    assert choice.held_out_tokens == 2 * 64
    for layer in converted[1]["budget"]["layers"]:
        ours = choice.costs[layer["module"]]
        assert {str(groups): kl for groups, kl in ours.items()} == pytest.approx(layer["kl"], rel=1e-3, abs=1e-6)
    assert seen[-1] == ("candidates", 4, 4)
    assert ("each layer alone", 12, 12) in seen
    assert list(tmp_path.iterdir()) == []


def test_a_killed_command_goes_on_from_what_was_measured(
    source: Path,
    text: Path,
    tmp_path: Path,
    converted: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the third pass over the layers, repeated on the same text, then on another text."""
    monkeypatch.setattr(divergences, "COPIES", 8)
    measured, passes = divergences.measure_divergences, list[int]()

    def counted(subject: Any, copies: Any, batches: Any, progress: Any) -> list[float]:
        if len(passes) == 2:
            raise KeyboardInterrupt
        passes.append(len(copies))
        return measured(subject, copies, batches, progress)

    def choose(tokens: int) -> BudgetChoice:
        kept = KeptDivergences(tmp_path / "out")
        options = CalibrationOptions(str(text), tokens, 64, device="cpu")
        budget = KVBudget("62.5%", share=Fraction(5, 8))
        return choose_groups(source, tmp_path / "out", budget, options, method="factor", kept=kept)

    monkeypatch.setattr(divergences, "measure_divergences", counted)
    with pytest.raises(KeyboardInterrupt):
        choose(640)
    kept = tmp_path / ".out.gqa-budget.json"
    assert list(tmp_path.iterdir()) == [kept]
    assert len(json.loads(kept.read_text())["divergences"]) == 16
    passes[:] = [0] * 3
    resumed = choose(640)
    assert passes[3:] == [4, len(resumed.candidates)], "the last four costs, then the candidates"
    assert resumed.groups == CHOSEN
    for layer in converted[1]["budget"]["layers"]:
        ours = {str(groups): kl for groups, kl in resumed.costs[layer["module"]].items()}
        assert ours == pytest.approx(layer["kl"], rel=1e-3, abs=1e-6)
    assert choose(640) == resumed
    assert len(passes) == 5, "nothing was measured again"
    KeptDivergences(tmp_path / "out").discard()
    assert list(tmp_path.iterdir()) == []
    assert not list(converted[0].parent.glob(".*gqa-budget*")), "a finished command leaves nothing"


def test_other_text_and_damaged_files_are_measured_again(source: Path, tmp_path: Path) -> None:
    kept = KeptDivergences(tmp_path / "out")
    plan = make_plan(open_checkpoint(source), 1)
    kept.open(plan, "text", "closed form")
    kept.add([{"a": 1}, {"a": 2}], 1, [0.5, math.inf])
    again = KeptDivergences(tmp_path / "out")
    again.open(plan, "text", "closed form")
    assert [again.find(copy, 1) for copy in ({"a": 1}, {"a": 2}, {"a": 3})] == [0.5, math.inf, None]
    assert again.find({"a": 1}, None) is None
    again.open(plan, "another text", "closed form")
    assert again.find({"a": 1}, 1) is None
    (tmp_path / ".out.gqa-budget.json").write_text("{")
    again.open(plan, "text", "closed form")
    assert again.find({"a": 1}, 1) is None


def test_a_picture_of_the_numbers() -> None:
    assert picture([8, 2, 1, 4, 8], [8] * 5) == ["layers 0-4      █▃▁▆█", "K/V heads       █ 8, ▆ 4, ▃ 2, ▁ 1"]
    rows = picture([1, 3] * 40, [3] * 80, ".#")
    assert [row[:16].strip() for row in rows] == ["layers 0-49", "layers 50-79", "K/V heads"]
    assert rows[0].endswith(".#" * 25)
    assert max(map(len, rows)) <= 80


def test_a_plan_shows_what_a_conversion_would_choose(
    source: Path, text: Path, converted: tuple[Path, dict[str, Any], str]
) -> None:
    shown = run("plan", source, "--kv-budget", SHARE, "-c", text, "-m", "factor", *OPTIONS)
    assert shown.returncode == 0, shown.stderr
    assert "--groups 12,3,12,3, 1,920 bytes (62.5%)" in shown.stdout
    assert "K/V heads" in shown.stdout
    assert "the least sum of divergences (chosen)" in shown.stdout
    assert "12 query heads, 12 -> 3 to 12 K/V heads" in shown.stdout
    assert "layers 0-3 " in converted[2]
    assert_mistake(run("plan", source, "--kv-budget", "50%", "--groups", "3"), "exclude each other")


def test_a_divergence_is_that_of_the_whole_models(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values of zero in place of merged heads, as in a model whose weights were edited."""
    monkeypatch.setattr(
        layer_merging,
        "merged_parameters",
        lambda work, site, merged, groups: {"v_proj.weight": torch.zeros_like(site.parameters()["v_proj.weight"])},
    )
    plan = make_plan(open_checkpoint(source), 1)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    blocks = torch.randint(3, 2048, (3, 32), generator=torch.Generator().manual_seed(0))
    ragged = [{"input_ids": blocks}, {"input_ids": blocks[:1, :20]}]
    with budget_run._inspecting(plan) as inspection:
        subject = divergences.Subject(
            model, plan.layers, inspection, [{"input_ids": blocks.flip(1)}], ragged, ClosedForm()
        )
        modules = [layer.module for layer in plan.layers]
        copies: list[dict[str, int]] = [{modules[1]: 3}, {modules[0]: 6, modules[3]: 3}, {}]
        found = divergences.measure_divergences(subject, copies, None, lambda done: None)
        first = divergences.measure_divergences(subject, copies[:1], 1, lambda done: None)
    for copy, kl in zip([*copies, copies[0]], [*found, *first], strict=True):
        edited = AutoModelForCausalLM.from_pretrained(source).eval()
        for module in copy:
            edited.get_submodule(module).v_proj.weight.data.zero_()
        batches = ragged[:1] if kl is first[0] else ragged
        with torch.inference_mode():
            total = sum(
                float(
                    torch.nn.functional.kl_div(
                        edited(**batch).logits.double().log_softmax(-1),
                        model(**batch).logits.double().log_softmax(-1),
                        reduction="sum",
                        log_target=True,
                    )
                )
                for batch in batches
            )
        assert kl == pytest.approx(total / sum(batch["input_ids"].numel() for batch in batches), rel=1e-3, abs=1e-6)
    assert found[0] > 1e-3


def test_a_copy_that_is_not_finite_is_never_chosen() -> None:
    candidates = (Candidate(Rule.UNIFORM, (2, 2), 8, 0.5), Candidate(Rule.SUM, (3, 1), 8, math.inf))
    choice = BudgetChoice("50%", 8, 16, candidates, {"layer": {1: math.inf}}, "text", 10)
    assert choice.groups == 2
    assert choice.as_json()["candidates"][1]["kl"] is None
    tied = (Candidate(Rule.UNIFORM, (2, 2), 8, 0.0), Candidate(Rule.SUM, (3, 1), 8, 0.0))
    assert BudgetChoice("50%", 8, 16, tied, {}, "text", 10).groups == 2


@pytest.mark.parametrize(
    ("kl", "margin", "chosen"), [(0.47, 1.0, [3, 1]), (0.47, 0.95, [3, 1]), (0.48, 0.95, 2), (0.48, 1.0, [3, 1])]
)
def test_for_fit_a_list_must_win_by_a_margin(kl: float, margin: float, chosen: Any) -> None:
    candidates = (Candidate(Rule.UNIFORM, (2, 2), 8, 0.5), Candidate(Rule.SUM, (3, 1), 8, kl))
    choice = BudgetChoice("50%", 8, 16, candidates, {}, "text", 10, by_short_fits=margin < 1)
    assert choice.groups == chosen
    assert choice.as_json()["margin"] == margin


@pytest.mark.parametrize(
    ("stated", "limit"),
    [("50%", 500), ("0.5", 500), (".5", 500), ("29%", 290), ("12.55 %", 125), ("500", 500), ("0.5kB", 500)],
)
def test_what_a_budget_allows(stated: str, limit: int) -> None:
    budget = cache_budget(stated)
    assert budget is not None
    assert budget.limit(1000, 100) == limit


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("100%", r"is not below the 1,000 bytes .* smallest possible budget is 83 bytes per token \(8.3%\)"),
        ("1", "is not below"),
        ("1KiB", "is not below"),
        ("8.2%", r"is 82 bytes .* state at least 83 bytes per token \(8.3%\)"),
        ("0", "is 0 bytes"),
        ("half", "'half' is neither a share nor a number of bytes"),
        ("-5%", "neither"),
    ],
)
def test_a_bad_budget(stated: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        cache_budget(stated).limit(1000, 83)  # type: ignore[union-attr]
    assert cache_budget(None) is None


def test_a_budget_excludes_numbers(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--kv-budget and --groups exclude each other"):
        check_one_choice_of_groups("3", None, "50%")
    with pytest.raises(OptionError, match="--kv-budget and --groups-file exclude each other"):
        check_one_choice_of_groups(None, tmp_path, "50%")
    with pytest.raises(OptionError, match=r"--groups is missing: .*--groups-file.*--kv-budget"):
        check_one_choice_of_groups(None, None, None)


def test_a_mistake_writes_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert_mistake(run("convert", source, out, "--kv-budget", "5%"), "state at least 256 bytes per token (8.4%)")
    assert_mistake(run("convert", source, out, "--kv-budget", "5%", "--groups", "3"), "exclude each other")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_converted_is_refused_before_text_is_read(source: Path, tmp_path: Path) -> None:
    missing = CalibrationOptions(str(tmp_path / "no text"))
    half = KVBudget("50%", share=Fraction(1, 2))
    mixtral = make_checkpoint("mixtral", tmp_path / "mixtral")
    with pytest.raises(GroupsError, match="all layers of a mixtral have one number"):
        choose_groups(mixtral, tmp_path / "out", half, missing)
    grouped = make_checkpoint("llama", tmp_path / "grouped", kv_heads=1, head_dim=8, intermediate_size=256)
    with pytest.raises(GroupsError, match="nothing to merge"):
        choose_groups(grouped, tmp_path / "out", half, missing)
    mute = make_checkpoint("llama", tmp_path / "mute", head_dim=8, intermediate_size=256)
    with pytest.raises(OptionError, match="it has no tokenizer: state the numbers with --groups"):
        choose_groups(mute, tmp_path / "out", half, missing)
    with pytest.raises(OutputError):
        choose_groups(source, source, half, missing)
    with pytest.raises(OptionError, match="--fit-steps 3 needs calibration text"):
        choose_groups(source, tmp_path / "out", half, CalibrationOptions(steps=3))


def test_the_layers_cost_what_they_take(source: Path) -> None:
    """A layer's bytes are those that the plan counts."""
    plan = make_plan(open_checkpoint(source), CHOSEN)
    assert budget_run._taken(budget_run._numbered(plan), CHOSEN) == plan.cache_bytes_per_token(after=True)
    assert len(plan.layers) * HEADS * HEAD_BYTES == plan.cache_bytes_per_token(after=False)


def test_commands_name_a_budget_where_layers_may_differ(source: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(source), 1)
    command = budget_command("model", plan, 4, {"--calibration": "text"})
    assert command == "gqa-convert convert model model-kv33 --kv-budget 33.4% --calibration text"
    mixtral = make_checkpoint("mixtral", tmp_path / "mixtral")
    assert budget_command("model", make_plan(open_checkpoint(mixtral), 1), 4, {}) is None
