"""Recipes: what they mean, what is refused and in which words, and that every shipped one can be
read.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gqa_convert.data.keys import fields_of
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.data.sources import Source
from gqa_convert.errors import RecipeError
from gqa_convert.training.recipe import Recipe, make_recipe, read_recipe
from tests.helpers.documents import ROOT, SHIPPED_RECIPES

BASE: dict[str, Any] = {"model": "m", "output": "o", "data": "d", "tokens": "10M"}
LINES = "model: m\noutput: o\ndata: d\ntokens: 10M\n"


def make(**keys: Any) -> Recipe:
    return make_recipe({key: value for key, value in (BASE | keys).items() if value != "absent"})


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """What a recipe's text is refused with, without the path in front."""
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).removeprefix(str(path)).lstrip(":, ")


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1_000_000", 10**6),
        ("1e6", 10**6),
        ("1.5e6", 1_500_000),
        ("10B", 10**10),
        ("500M", 5 * 10**8),
        ("640k", 640_000),
        ("64Ki", 65536),
        ("1Mi", 2**20),
        ("1Gi", 2**30),
        ("20K", 20_000),
        ("2G", 2 * 10**9),
        ("1T", 10**12),
        ("0.3B", 3 * 10**8),
        ("1.1e10", 11 * 10**9),
    ],
)
def test_token_counts(written: str, number: int, tmp_path: Path) -> None:
    path = write(tmp_path, LINES.replace("10M", written))
    recipe = read_recipe(path, ["tokens_per_step=1k"])
    assert recipe.tokens == number
    assert recipe.tokens_per_step == 1000
    assert isinstance(recipe.tokens, int)


BADKEYS = {
    "lerning_rate: 1e-4": "lerning_rate is an unknown key: did you mean 'learning_rate'?",
    "qwertz: 4": "qwertz is an unknown key: the documentation lists all keys",
    "learning_rate: fast": "learning_rate is fast: it must be a number",
    "learning_rate: 2": "learning_rate is 2.0: it must be less than or equal to 1",
    "learning_rate: 0": "learning_rate is 0.0: it must be",
    "warmup_steps: -1": "warmup_steps is -1: it must be greater than or equal to 0",
    "micro_batch_size: 0": "micro_batch_size is 0: it must be greater than or equal to 1",
    "seed: 4294967296": "seed is 4294967296: it must be less than or equal to 4294967295",
    "schedule: linear": "schedule is linear: it must be 'constant', 'cosine' or 'wsd'",
    "sharding: half": "sharding is half: it must be 'auto', 'replicate', 'full' or 'hybrid'",
    "gradient_checkpointing: yes": "gradient_checkpointing is yes: it must be true or false",
    "gradient_clipping: 1e999": "gradient_clipping is 1e999: it must be a number",
    f"seed: {'9' * 5000}": "seed is 999",
    "trackers: [wandb, wnadb]": "trackers[1] is wnadb: it must be 'aim', 'clearml'",
    "distillation_weight: 0.5": (
        "distillation_weight is given without a teacher: name the source checkpoint as teacher, or "
        "remove distillation_weight"
    ),
    "alpha: 0.05": (
        "the budget is stated by tokens and alpha: give tokens alone (such as 2B), or alpha with "
        "pretraining_tokens"
    ),
    "pretraining_tokens: 1T": "the budget is stated by tokens and pretraining_tokens: give",
    "sequence_length: 1": "sequence_length is 1: it must be greater than or equal to 2",
    "sequence_length: 128k": (
        "tokens_per_step is 65536 and sequence_length is 128000: a step must hold at least one "
        "sequence"
    ),
    "tokens_per_step: 20M": (
        "the budget is 10000000 tokens and tokens_per_step is 20000000: raise the budget or lower "
        "tokens_per_step"
    ),
    "evaluate_every: 5": "evaluate_every is 5 and there is no evaluation_data",
    "evaluation_data: []": "evaluation_data is []: it is an empty list",
    "objective: pairs": (
        "objective is pairs, and data[0] holds running text: name pairs of texts (source_field and "
        "target_field), or"
    ),
    "teacher: ./m": "teacher and model are both m",
    "teacher: ''": "teacher is empty: it must be text",
}


@pytest.mark.parametrize("lines", BADKEYS)
def test_bad_keys(lines: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, LINES + lines + "\n").startswith(BADKEYS[lines])


BAD_DATA = {
    "[]": "data is []: it is an empty list: name at least one file",
    "null": "data[0].source is null: it must be a valid string",
    "[a, {source: b, wieght: 2}]": "data[1].wieght is an unknown key: did you mean 'weight'?",
    "{path: b}": "data[0].source is missing: add this key",
    "[{source: b, weight: 0}]": "data[0].weight is 0.0: it must be greater than 0",
    "{source: b, source_field: x}": (
        "data[0] names only one of source_field and target_field: give both, or neither"
    ),
    "[a, {source: b, target_field: x}]": (
        "data[1] names only one of source_field and target_field: give both, or neither"
    ),
    "{source: b, source_field: x, target_field: y, text_field: z}": (
        "data[0] has text_field, which pairs do not have: remove text_field"
    ),
    "[a, {source: b, source_field: x, target_field: y}]": (
        "data holds running text, and data[1] holds pairs of texts (source_field and "
        "target_field): name running text or"
    ),
}


@pytest.mark.parametrize("written", BAD_DATA)
def test_bad_data(written: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, LINES.replace("data: d", f"data: {written}")).startswith(
        BAD_DATA[written]
    )


BAD_YAML = {
    "": "holds no keys",
    "- a\n- b\n": "holds no keys",
    f"{LINES}seed: 1\nseed: 2\n": "line 6 is not valid YAML: 'seed' is given twice",
    f"{LINES[:-1]}\ndata: {{source: a, source: b}}\n": (
        "line 5 is not valid YAML: 'data' is given twice"
    ),
    "model: m\n  output: o\n": "line 2 is not valid YAML: mapping values are not allowed here",
    "model: !!python/name:os.system m\n": (
        "line 1 is not valid YAML: could not determine a constructor for the tag"
    ),
    f"<<: {{model: m}}\n{LINES}": "<< is an unknown key",
    "model: m\n---\nmodel: n\n": "line 2 is not valid YAML: but found another document",
    f"null: m\n{LINES}": "None is null: Keys should be strings",
    "model: m\x07\n": "is not valid YAML: unacceptable character",
}


@pytest.mark.parametrize("text", BAD_YAML, ids=range(len(BAD_YAML)))
def test_bad_yaml(text: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text).startswith(BAD_YAML[text])


@pytest.mark.parametrize(
    "keys", [{}, {"alpha": 0.1}, {"pretraining_tokens": "1T"}, {"tokens": None}]
)
def test_missing_budgets(keys: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"the budget is stated by .*: give tokens alone"):
        make(**{"tokens": "absent"} | keys)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    for path, problem in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "latin.yaml", "utf-8"),
    ):
        with pytest.raises(
            RecipeError, match=rf"can't be read \(.*{problem}.*\): give the path of a YAML file"
        ):
            read_recipe(path)


def test_output_must_lie_apart(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("")
    model = str(tmp_path / "model")
    for output in (model, f"{model}/../model/", f"{model}/run", str(tmp_path)):
        with pytest.raises(
            RecipeError, match=r"output .* and model .* are the same folder or nested"
        ):
            make(model=model, output=output)
    with pytest.raises(RecipeError, match="is a file"):
        make(model=model, output=str(tmp_path / "file"))
    with pytest.raises(RecipeError, match=r"and teacher .* are the same folder or nested"):
        make(teacher=model, output=model)
    assert make(model=model, output=str(tmp_path / "run")).model == model


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, LINES + "learning_rate: 1e-3\n")
    recipe = read_recipe(
        path,
        [
            "learning_rate=5e-5",
            "data=[a, {source: b, weight: 2}]",
            "gradient_checkpointing=true",
            "gradient_clipping=null",
            "output=x=y",
        ],
    )
    assert recipe.learning_rate == 5e-5
    assert recipe.data == (Source("a"), Source("b", 2.0))
    assert recipe.gradient_checkpointing
    assert recipe.gradient_clipping is None
    assert recipe.output == "x=y"
    with pytest.raises(
        RecipeError, match="the override 'seed' has no value: write it as key=value"
    ):
        read_recipe(path, ["seed"])


@given(st.integers(1, 10**7), st.integers(1, 10**5), st.integers(0, 10**10))
def test_steps_are_the_fewest_that_hold_the_budget(
    tokens_per_step: int, tokens_per_sample: int, extra: int
) -> None:
    recipe = make(tokens=tokens_per_step + extra, tokens_per_step=tokens_per_step)
    samples = recipe.samples_per_step(tokens_per_sample)
    assert samples >= 1
    assert (
        samples == 1 or abs(samples * tokens_per_sample - tokens_per_step) * 2 <= tokens_per_sample
    )
    steps = recipe.steps(tokens_per_sample)
    assert (
        (steps - 1) * samples * tokens_per_sample
        < recipe.budget_tokens
        <= steps * samples * tokens_per_sample
    )


def test_warmup() -> None:
    assert [make().warmup(steps) for steps in (1, 49, 50, 1000, 10**6)] == [0, 0, 1, 20, 1000]
    assert make(warmup_steps=7).warmup(7) == 7
    assert make(warmup_steps=0).warmup(7) == 0
    with pytest.raises(RecipeError, match="warmup_steps is 7 and the budget lasts 6 steps"):
        make(warmup_steps=7).warmup(6)


@pytest.mark.parametrize("path", SHIPPED_RECIPES, ids=lambda path: path.stem)
def test_resolved_recipes_make_themselves(path: Path) -> None:
    recipe = read_recipe(path)
    resolved = recipe.resolved()
    assert list(resolved) == list(fields_of(Recipe))
    assert make_recipe(resolved) == recipe
    assert make_recipe(json.loads(json.dumps(resolved))) == recipe
    assert make_recipe(yaml.safe_load(yaml.safe_dump(resolved))) == recipe


def test_differences() -> None:
    recipe = make(seed=1)
    assert recipe.differences(make(seed=2, objective="causal"), "never") == [
        "objective was auto and is now causal",
        "seed was 1 and is now 2",
    ]
    same = {"save_every": 7, "trackers": ["wandb"], "output": "elsewhere", "sharding": "full"}
    assert (
        recipe.differences(make(seed=1, **same, gradient_clipping=None, tokens="20M"), "never")
        == []
    )
    assert recipe.differences(
        make(seed=1, **same, gradient_clipping=None, tokens="20M"), "recorded", "budget"
    ) == ["tokens was 10000000 and is now 20000000", "gradient_clipping was 1.0 and is now null"]
    other = make(seed=1, data=["d", {"source": "e", "weight": 2}])
    assert recipe.differences(other, "never") == [
        "data was [{'source': 'd'}] and is now [{'source': 'd'}, {'source': 'e', 'weight': 2.0}]"
    ]


def test_the_page_has_every_key_as_it_is_declared() -> None:
    script = ROOT / "docs" / "make_recipe_keys.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_objective_has_a_record_and_a_row() -> None:
    page = (ROOT / "docs" / "uptraining-reference.md").read_text(encoding="utf-8")
    for name in OBJECTIVES:
        assert f"\n| `{name}` |" in page, (
            f"docs/uptraining-reference.md: the table of objectives has no row for {name}"
        )
