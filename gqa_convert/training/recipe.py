"""The recipe of an uptraining run: a validated, frozen `Recipe`, read from a flat YAML file with
`key=value` overrides.

Everything that can be refused without loading a model or a text is refused here, in one line for
each mistake.

Plain YAML scalars stay text until the key's type converts them, so that 1e9, 10B and 2e-4 are read
as numbers and `no` as text (YAML 1.1 reads 1e9 as text and `no` as false).
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, WithJsonSchema
from pydantic.dataclasses import dataclass

from gqa_convert.data.keys import (
    CONFIG,
    Flag,
    PathText,
    Real,
    Text,
    Tokens,
    Whole,
    declared_in,
    fields_of,
    read_keys,
    shown,
)
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.data.sources import KINDS, Source, Sources, pinned
from gqa_convert.errors import RecipeError
from gqa_convert.runtime.json_objects import JsonObject, plain
from gqa_convert.runtime.paths import local_path

from .optimizers import OPTIMIZERS

Tracker = Literal[
    "aim", "clearml", "comet_ml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"
]
"""Experiment trackers that accelerate supports."""


def _check_objective(name: str) -> str:
    if name not in ("auto", *OBJECTIVES):
        raise ValueError(f"it must be auto, {', '.join(OBJECTIVES)}")
    return name


ObjectiveName = Annotated[
    Text,
    AfterValidator(_check_objective),
    WithJsonSchema({"enum": ["auto", *OBJECTIVES], "type": "string"}),
]

_declared = declared_in(Path(__file__).with_suffix(".toml"))


@dataclass(frozen=True, kw_only=True, config=CONFIG)
@_declared
class Lora:
    """The recipe's key `lora`: low-rank adapters (Hu et al. 2021) on every linear layer but the
    output layer of a model whose own weights stay fixed.
    """

    rank: Whole
    quantize: Literal["nf4"] | None

    def __str__(self) -> str:
        base = f" on weights in {self.quantize}" if self.quantize else ""
        return f"LoRA of rank {self.rank}{base}"


@dataclass(frozen=True, kw_only=True, config=CONFIG)
@_declared
class Recipe:
    """The settings of an uptraining run; `recipe.toml` says what the keys mean. `read_recipe` and
    `make_recipe` create and validate recipes.
    """

    model: PathText
    output: PathText
    data: Sources
    objective: ObjectiveName
    sequence_length: Tokens | None
    document_masks: Flag
    micro_batch_size: Whole
    tokens: Tokens | None
    alpha: Real | None
    pretraining_tokens: Tokens | None
    tokens_per_step: Tokens
    learning_rate: Real
    warmup_steps: Whole | None
    schedule: Literal["constant", "cosine", "wsd"]
    final_learning_rate: Real
    decay_share: Real
    optimizer: Literal[*OPTIMIZERS]  # type: ignore[valid-type]
    weight_decay: Real
    gradient_clipping: Real | None
    precision: Literal["bf16", "no"]
    gradient_checkpointing: Flag
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None
    compile: Flag
    sharding: Literal["auto", "replicate", "full", "hybrid"]
    lora: Lora | None
    seed: Whole
    save_every: Whole
    keep_checkpoints: Whole
    export_every: Whole | None
    evaluate_every: Whole | None
    evaluation_data: Sources | None
    evaluation_tokens: Tokens
    z_loss: Real
    teacher: PathText | None
    distillation_weight: Real | None
    trackers: tuple[Tracker, ...]
    log_every: Whole

    @property
    def budget_tokens(self) -> int:
        """The training budget in tokens of text, whichever keys state it."""
        return self.tokens or round(Fraction(repr(self.alpha)) * (self.pretraining_tokens or 0))

    def pinned(self, commits: Mapping[str, str]) -> "Recipe":
        """The recipe with the commits of Hub datasets as their revisions.

        Args:
            commits: by dataset and revision, as `find_commits` returns them.
        """
        evaluation = self.evaluation_data and pinned(self.evaluation_data, commits)
        return replace(self, data=pinned(self.data, commits), evaluation_data=evaluation)

    def samples_per_step(self, tokens_per_sample: int | Fraction) -> int:
        """Samples of a step over all processes: the whole number nearest to `tokens_per_step`, at
        least one.
        """
        return max(1, (2 * self.tokens_per_step + tokens_per_sample) // (2 * tokens_per_sample))

    def steps(self, tokens_per_sample: int | Fraction) -> int:
        """The smallest number of whole steps that covers the budget."""
        tokens_per_step = self.samples_per_step(tokens_per_sample) * tokens_per_sample
        return -(-self.budget_tokens // tokens_per_step)

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run with so many steps.

        Raises:
            RecipeError: the recipe states more of them than the run has.
        """
        if self.warmup_steps is None:
            return min(1000, steps // 50)
        if self.warmup_steps > steps:
            raise RecipeError(
                f"warmup_steps is {self.warmup_steps} and the budget lasts {steps} steps: "
                "lower warmup_steps or raise the budget"
            )
        return self.warmup_steps

    def resolved(self) -> JsonObject:
        """All keys as plain data, including defaults; `make_recipe` restores the recipe from it."""
        return plain(self)  # type: ignore[no-any-return]

    def differences(self, other: "Recipe", *kinds: str) -> list[str]:
        """The keys in which another recipe differs.

        Args:
            other: the recipe to resume with.
            kinds: when the keys may `change`, see `declared_in`; others are not compared.

        Returns:
            A phrase for each such key, such as "seed was 0 and is now 1".
        """
        found = []
        for name, key in fields_of(Recipe).items():
            before = getattr(self, name)
            after = getattr(other, name)
            if before != after and key.json_schema_extra["change"] in kinds:
                found.append(f"{name} was {_brief(before)} and is now {_brief(after)}")
        return found


def _brief(value: Any) -> str:
    """A value for a message, without the defaults of sources."""
    if isinstance(value, tuple):
        return shown([each.stated() if isinstance(each, Source) else each for each in value])
    return shown(value)


def make_recipe(values: JsonObject) -> Recipe:
    """A recipe from plain data, such as `Recipe.resolved()` returns.

    Raises:
        RecipeError: a key is unknown, missing, malformed, or contradicts another; a line for each
            mistake.
    """
    try:
        recipe = read_keys(Recipe, values)
    except ValueError as problem:
        raise RecipeError(str(problem)) from None
    if mistakes := [*_mistakes(recipe), *_source_mistakes(recipe)]:
        raise RecipeError("\n".join(mistakes))
    if recipe.teacher and recipe.distillation_weight is None:
        recipe = replace(recipe, distillation_weight=1.0)
    return recipe


def _mistakes(recipe: Recipe) -> Iterator[str]:
    """Keys that contradict one another."""
    budget = ("tokens", "alpha", "pretraining_tokens")
    stated = [name for name in budget if getattr(recipe, name) is not None]
    if stated not in (["tokens"], ["alpha", "pretraining_tokens"]):
        yield (
            f"the budget is stated by {' and '.join(stated) or 'no key'}: give tokens alone "
            "(such as 2B), or alpha with pretraining_tokens"
        )
    elif recipe.budget_tokens < recipe.tokens_per_step:
        yield (
            f"the budget is {recipe.budget_tokens} tokens and tokens_per_step is "
            f"{recipe.tokens_per_step}: raise the budget or lower tokens_per_step"
        )
    if recipe.tokens_per_step < (recipe.sequence_length or 0):
        yield (
            f"tokens_per_step is {recipe.tokens_per_step} and sequence_length is "
            f"{recipe.sequence_length}: a step must hold at least one sequence"
        )
    output = Path(os.path.realpath(recipe.output))
    if output.is_file():
        yield f"output {recipe.output} is a file: name a folder"
    for name, named in (("model", recipe.model), ("teacher", recipe.teacher)):
        folder = Path(os.path.realpath(named or recipe.model))
        if output.is_relative_to(folder) or folder.is_relative_to(output):
            yield (
                f"output {recipe.output} and {name} {named} are the same folder or nested: "
                "name a separate folder for output"
            )
    if recipe.teacher and Path(recipe.teacher) == Path(recipe.model):
        yield (
            f"teacher and model are both {recipe.model}: the teacher is the checkpoint that the "
            "model was converted from"
        )
    if recipe.evaluate_every and not recipe.evaluation_data:
        yield (
            f"evaluate_every is {recipe.evaluate_every} and there is no evaluation_data: "
            "name text to evaluate on"
        )
    if not recipe.teacher and recipe.distillation_weight is not None:
        yield (
            "distillation_weight is given without a teacher: name the source checkpoint as "
            "teacher, or remove distillation_weight"
        )


def _source_mistakes(recipe: Recipe) -> Iterator[str]:
    """Sources whose keys contradict one another, the other sources or the objective."""
    if recipe.objective == "auto":
        first = recipe.data[0].kind
        reads = next(each.reads for each in OBJECTIVES.values() if first in each.reads)
        reason = f"data holds {KINDS[first]}"
    else:
        reads = OBJECTIVES[recipe.objective].reads
        reason = f"objective is {recipe.objective}"
    for key in ("data", "evaluation_data"):
        for number, source in enumerate(getattr(recipe, key) or ()):
            name = f"{key}[{number}]"
            stated = source.stated()
            if ("source_field" in stated) != ("target_field" in stated):
                yield (
                    f"{name} names only one of source_field and target_field: give both, or neither"
                )
            if source.kind == "pairs":
                for other in ("text_field", "format"):
                    if other in stated:
                        yield f"{name} has {other}, which pairs do not have: remove {other}"
            if source.kind not in reads:
                wanted = " or ".join(KINDS[kind] for kind in reads)
                yield (
                    f"{reason}, and {name} holds {KINDS[source.kind]}: "
                    f"name {wanted}, or change objective"
                )


class _Loader(yaml.SafeLoader):
    """A YAML loader for which scalars are text, true, false or null, and a key that is given twice
    is a mistake.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?i:true|false)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(?:~|(?i:null)|)$"), None)


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as mistake:
        mark = getattr(mistake, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark and "\n" in text else ""
        problem = getattr(mistake, "problem", None) or str(mistake).splitlines()[0]
        raise RecipeError(f"{where}{line} is not valid YAML: {problem}") from None


def read_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe in a YAML file.

    Args:
        path: the path of the file.
        overrides: `key=value` pairs that replace values of the file. A budget stated here replaces
            the file's budget, whichever keys state it.

    Raises:
        RecipeError: the file or an override can't be read, or the recipe is inconsistent.
    """
    values = _read_file(local_path(path))
    changes = _read_overrides(overrides)
    if changes.get("tokens") is not None:
        values.pop("alpha", None)
        values.pop("pretraining_tokens", None)
    elif changes.get("alpha") is not None and "pretraining_tokens" in values | changes:
        values.pop("tokens", None)
    return make_recipe(values | changes)


def _read_file(path: Path) -> JsonObject:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise RecipeError(
            f"the recipe {path} can't be read ({problem}): give the path of a YAML file"
        ) from None
    loaded = _load(text + "\n", str(path))
    if not loaded or not isinstance(loaded, dict):
        raise RecipeError(
            f"{path} holds no keys: a recipe is a list of lines `key: value`, with at least "
            "model, output, data and tokens"
        )
    return loaded


def _read_overrides(overrides: Iterable[str]) -> JsonObject:
    values = {}
    for override in overrides:
        name, sign, text = override.partition("=")
        if not sign:
            raise RecipeError(f"the override {override!r} has no value: write it as key=value")
        values[name.strip()] = _load(text, f"the override {override!r}")
    return values
