"""Recipes of uptraining: a flat YAML file, with `key=value` overrides, made into a checked and frozen `Recipe`.

Everything that can be refused without loading a model or a text is refused here. Plain YAML scalars stay text until the key's
own reader makes a number of them, so that 1e9, 10B and 2e-4 mean what they look like (YAML 1.1 reads 1e9 as text, and `no` as
false).
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from gqa_convert.errors import RecipeError

Objective = Literal["auto", "causal", "span_corruption", "ul2"]
Schedule = Literal["constant", "cosine", "inverse_sqrt", "wsd"]
OptimizerName = Literal["adamw", "adafactor", "muon"]
Precision = Literal["bf16", "no"]
Trainable = Literal["all", "attention", "kv"]
TeacherDtype = Literal["bf16", "float32", "auto"]

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""What `trackers` may name: those that accelerate knows."""

BUDGET = ("tokens", "alpha", "pretraining_tokens")
"""The keys that say how long training lasts."""

BOOKKEEPING = (
    "output", "save_every", "keep_checkpoints", "evaluate_every", "evaluation_data", "evaluation_tokens", "trackers", "log_every",
)  # fmt: skip
"""Keys that leave the trained weights as they are: a resumed run may change them."""

EXECUTION = ("micro_batch_size", "gradient_checkpointing", "compile")
"""Keys that change rounding, memory and speed alone: a run that ran out of memory may go on with others."""

_LONGEST_FILE = 1_000_000  # bytes


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where text comes from: files, a glob, a Hub data set, or `python-stdlib`."""

    source: str
    weight: float = 1.0
    """Its share of the samples, beside those of the other sources."""
    text_field: str = "text"
    """Name of the column that holds the text, in JSONL, Parquet and Hub data sets."""
    split: str = "train"
    name: str | None = None
    """The configuration of a Hub data set."""
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a converted checkpoint is uptrained. Made by `read_recipe` or `make_recipe`, which check it."""

    model: str
    """The converted checkpoint: a folder or a Hub id."""
    output: str
    """Folder of the run: its checkpoints, its log and the trained model."""
    data: tuple[DataSource, ...]
    """Training text."""
    objective: Objective = "auto"
    """`auto` is span corruption for encoder-decoders and next-token prediction for all others."""
    sequence_length: int | None = None
    """Tokens of a sample; by default the model's context up to 2048, and 512 for span corruption."""
    micro_batch_size: int = 1
    """Sequences per process and forward pass: a matter of memory, never of the result's meaning."""
    tokens: int | None = None
    """The budget, in tokens of text."""
    alpha: float | None = None
    """The budget as a share of `pretraining_tokens`."""
    pretraining_tokens: int | None = None
    """Tokens that the source was pretrained on."""
    tokens_per_step: int = 65536
    """Of all processes together; rounded to whole sequences."""
    learning_rate: float = 2e-4
    """The peak."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; by default 2% of all, at most 1000."""
    schedule: Schedule = "cosine"
    final_learning_rate: float = 0.1
    """Share of `learning_rate` that cosine and wsd end at."""
    decay_share: float = 0.2
    """Share of the steps in which wsd decays."""
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.0
    """On matrices only."""
    beta1: float = 0.9
    """Of AdamW, alone or beside Muon."""
    beta2: float = 0.95
    gradient_clipping: float | None = 1.0
    """Largest norm of all gradients together."""
    precision: Precision = "bf16"
    """Of the computation; weights and moments are float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    trainable: Trainable = "all"
    """`attention`: its projections; `kv`: key and value projections, and whole fused tensors that hold them."""
    dropout: float = 0.0
    """Probability in every dropout of the model, in place of its config's: uptraining goes on with pretraining, which T5 1.1 and most
    decoders did without."""
    seed: int = 0
    save_every: int = 500
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """How many of the last are kept."""
    evaluate_every: int | None = None
    """Steps between evaluations."""
    evaluation_data: tuple[DataSource, ...] | None = None
    """Text that is not trained on."""
    evaluation_tokens: int = 131072
    teacher: str | None = None
    """The source checkpoint, to distil from: a folder or a Hub id."""
    distillation_weight: float | None = None
    """Weight of the match with the teacher, the language-model loss having the rest; by default 1.0 with a teacher."""
    temperature: float = 1.0
    """Of student and teacher, in the match."""
    teacher_top_k: int | None = None
    """Match this many of the teacher's most likely tokens, and the rest as one."""
    teacher_dtype: TeacherDtype = "auto"
    attention_matching: float = 0.0
    """Weight of the match of each layer's attention output with the teacher's."""
    document_mask: bool = False
    """Tokens attend to their own document only."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers to report to, besides the log file."""
    compile: bool = False
    """Use torch.compile."""
    log_every: int = 1
    """Steps between lines of the log."""

    @property
    def budget_tokens(self) -> int:
        """Tokens of text to train on, however the recipe states them."""
        if self.tokens is not None:
            return self.tokens
        assert self.alpha is not None
        assert self.pretraining_tokens is not None
        share = Decimal(repr(self.alpha)) * self.pretraining_tokens
        return int(share.to_integral_value(ROUND_HALF_UP))

    @property
    def language_model_weight(self) -> float:
        """Weight of the language-model loss: what distillation leaves of 1."""
        return 1.0 - (self.distillation_weight or 0.0)

    def samples_per_step(self, tokens_per_sample: int) -> int:
        """Sequences of a step over all processes: the whole number nearest to `tokens_per_step`, at least one."""
        return max(1, (2 * self.tokens_per_step + tokens_per_sample) // (2 * tokens_per_sample))

    def steps(self, tokens_per_sample: int) -> int:
        """The fewest whole steps that train on the budget."""
        return -(-self.budget_tokens // (self.samples_per_step(tokens_per_sample) * tokens_per_sample))

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of so many steps.

        Raises:
            RecipeError: the recipe states more of them than the run has.
        """
        if self.warmup_steps is None:
            return min(1000, steps // 50)
        if self.warmup_steps > steps:
            raise RecipeError(
                f"warmup_steps is {self.warmup_steps} and the budget lasts {steps} steps: lower warmup_steps or raise the budget"
            )
        return self.warmup_steps

    def resolved(self) -> dict[str, Any]:
        """All keys as plain data, defaults filled in; `make_recipe` makes the same recipe of it."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def differences(
        self, other: "Recipe", may_grow: Iterable[str] = BUDGET, may_change: Iterable[str] = (*BOOKKEEPING, *EXECUTION)
    ) -> tuple[str, ...]:  # fmt: skip
        """What speaks against resuming a run of this recipe with another one.

        Args:
            other: the recipe to go on with.
            may_grow: keys that may differ as long as the number that they state, or the budget that they state together, does not shrink.
            may_change: keys that may differ in any way.

        Returns:
            A phrase for each key in the way, such as "seed was 0 and is now 1"; nothing where the run can go on.
        """
        before, after = self.resolved(), other.resolved()
        growing, free = set(may_grow), set(may_change)
        keys = [key for key in before if before[key] != after[key] and key not in free]
        found = [
            f"{key} was {_shown(_brief(before[key]))} and is now {_shown(_brief(after[key]))}"
            for key in keys
            if not (key in growing and (key in BUDGET or _grown(before[key], after[key])))
        ]
        if growing & {*BUDGET} & {*keys} and other.budget_tokens < self.budget_tokens:
            found.append(f"the budget was {self.budget_tokens} tokens and is now {other.budget_tokens}")
        return tuple(found)


def _grown(before: object, after: object) -> bool:
    return isinstance(before, int | float) and isinstance(after, int | float) and after >= before


def _shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _brief(value: Any) -> Any:
    """Plain data, with sources of text as a recipe may write them: without what is as by default."""
    if isinstance(value, list):
        return f"[{', '.join(str(_brief(item)) for item in value)}]" if len(value) != 1 else _brief(value[0])
    if not isinstance(value, dict):
        return value
    usual = dataclasses.asdict(DataSource(""))
    stated = {key: item for key, item in value.items() if key == "source" or item != usual[key]}
    return value["source"] if len(stated) == 1 else f"{{{', '.join(f'{key}: {item}' for key, item in stated.items())}}}"


def _plain(value: Any) -> Any:
    if isinstance(value, DataSource):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# Readers: each takes a key's name, for messages, and what was given, and returns the value.

_Reader = Callable[[str, Any], Any]
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,3})?)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def _exact(value: object) -> Fraction | None:
    """The number that a scalar says, exactly; None if it says none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(repr(value)) if math.isfinite(value) else None
    if isinstance(value, str) and len(value) < 100 and _NUMBER.fullmatch(value.strip()):
        return Fraction(value.strip().replace("_", ""))
    return None


def _counted(value: object) -> Fraction | None:
    """The same, where 10B, 500M and 64k are numbers too."""
    match = re.fullmatch(rf"{_NUMBER.pattern}\s*({'|'.join(_UNITS)})", value.strip()) if isinstance(value, str) else None
    number = _exact(match[1]) if match else _exact(value)
    return number * _UNITS[match[2]] if match and number is not None else number


def _whole(least: int = 1, most: int = 10**18, units: bool = False) -> _Reader:
    def read(key: str, value: Any) -> int:
        number = _counted(value) if units else _exact(value)
        wanted = "a whole number" + (" such as 65536, 1e9, 10B or 500M" if units else "")
        if number is None or number.denominator != 1:
            raise RecipeError(f"{key} is {_shown(value)}: it must be {wanted}")
        if not least <= number <= most:
            raise RecipeError(f"{key} is {_shown(value)}: it must be at least {least}" + (f" and at most {most}" if number > most else ""))
        return int(number)

    return read


def _real(above: float = -math.inf, least: float = -math.inf, below: float = math.inf, most: float = math.inf) -> _Reader:
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {least:g}"] * (least > -math.inf)
    bounds += [f"below {below:g}"] * (below < math.inf) + [f"at most {most:g}"] * (most < math.inf)

    def read(key: str, value: Any) -> float:
        exact = _exact(value)
        number = math.nan if exact is None or abs(exact) > 10**300 else float(exact)
        if not (above < number < below and least <= number <= most):
            raise RecipeError(f"{key} is {_shown(value)}: it must be a number {' and '.join(bounds)}")
        return number

    return read


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RecipeError(f"{key} is {_shown(value)}: it must be true or false")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise RecipeError(f"{key} is {_shown(value) or 'empty'}: it must be text")
    return value


def _place(key: str, value: Any) -> str:
    """A path, where `~/` is the home folder, or a Hub id."""
    text = _text(key, value)
    return os.path.expanduser(text) if text.startswith("~/") else text  # noqa: PTH111 - a Hub id is no Path


def _choice(of: Any) -> _Reader:
    choices = get_args(of)

    def read(key: str, value: Any) -> str:
        if value not in choices:
            raise RecipeError(f"{key} is {_shown(value)}: it must be {', '.join(choices[:-1])} or {choices[-1]}")
        return str(value)

    return read


def _or_none(reader: _Reader) -> _Reader:
    return lambda key, value: None if value is None else reader(key, value)


def _trackers(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise RecipeError(f"{key} is {_shown(value)}: it must be a list such as [tensorboard]")
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(f"{key} names {_shown(name)}: the trackers are {', '.join(TRACKERS)}")
    if len({*names}) < len(names):
        raise RecipeError(f"{key} names a tracker twice: {_shown(names)}; name each once")
    return tuple(names)


_SOURCE_KEYS: dict[str, _Reader] = {
    "source": _place, "weight": _real(above=0), "text_field": _text, "split": _text, "name": _or_none(_text), "revision": _or_none(_text),
}  # fmt: skip


def _sources(key: str, value: Any) -> tuple[DataSource, ...]:
    """A string, a mapping, or a list of both."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise RecipeError(f"{key} is an empty list: name at least one file, glob or Hub data set")
    return tuple(_source(f"{key}[{index}]" if isinstance(value, list | tuple) else key, item) for index, item in enumerate(items))


def _source(key: str, item: Any) -> DataSource:
    if isinstance(item, DataSource):
        item = dataclasses.asdict(item)
    if not isinstance(item, Mapping):
        return DataSource(_place(key, item))
    for name in item:
        if name not in _SOURCE_KEYS:
            raise RecipeError(f"{key} has an unknown key {_quoted(name)}: {_instead(name, _SOURCE_KEYS)}")
    if "source" not in item:
        raise RecipeError(f"{key} has no key 'source': name a file, a glob or a Hub data set")
    return DataSource(**{name: _SOURCE_KEYS[name](f"{key}.{name}", value) for name, value in item.items()})


_tokens = _whole(units=True)
_KEYS: dict[str, _Reader] = {
    "model": _place,
    "output": _place,
    "data": _sources,
    "objective": _choice(Objective),
    "sequence_length": _or_none(_whole(least=2, most=2**24, units=True)),
    "micro_batch_size": _whole(most=2**20),
    "tokens": _or_none(_tokens),
    "alpha": _or_none(_real(above=0, most=1)),
    "pretraining_tokens": _or_none(_tokens),
    "tokens_per_step": _tokens,
    "learning_rate": _real(above=0, most=1),
    "warmup_steps": _or_none(_whole(least=0)),
    "schedule": _choice(Schedule),
    "final_learning_rate": _real(least=0, most=1),
    "decay_share": _real(above=0, most=1),
    "optimizer": _choice(OptimizerName),
    "weight_decay": _real(least=0, most=10),
    "beta1": _real(least=0, below=1),
    "beta2": _real(least=0, below=1),
    "gradient_clipping": _or_none(_real(above=0)),
    "precision": _choice(Precision),
    "gradient_checkpointing": _boolean,
    "trainable": _choice(Trainable),
    "dropout": _real(least=0, below=1),
    "seed": _whole(least=0, most=2**32 - 1),
    "save_every": _whole(),
    "keep_checkpoints": _whole(),
    "evaluate_every": _or_none(_whole()),
    "evaluation_data": _or_none(_sources),
    "evaluation_tokens": _tokens,
    "teacher": _or_none(_place),
    "distillation_weight": _or_none(_real(least=0, most=1)),
    "temperature": _real(above=0, most=1000),
    "teacher_top_k": _or_none(_whole()),
    "teacher_dtype": _choice(TeacherDtype),
    "attention_matching": _real(least=0),
    "document_mask": _boolean,
    "trackers": _trackers,
    "compile": _boolean,
    "log_every": _whole(),
}
"""The reader of each key, in the order of Recipe's fields."""

# What other programs call these things.
_OTHER_NAMES = {
    "lr": "learning_rate", "batch_size": "tokens_per_step", "gradient_accumulation_steps": "tokens_per_step", "dataset": "data",
    "datasets": "data", "max_steps": "tokens", "steps": "tokens", "num_train_epochs": "tokens", "epochs": "tokens",
    "output_dir": "output", "out": "output", "max_length": "sequence_length", "max_seq_length": "sequence_length",
    "block_size": "sequence_length", "max_grad_norm": "gradient_clipping", "lr_scheduler_type": "schedule", "warmup": "warmup_steps",
    "mixed_precision": "precision", "report_to": "trackers", "source": "model", "save_total_limit": "keep_checkpoints",
    "path": "source", "dataset_config": "name", "subset": "name", "column": "text_field",
}  # fmt: skip


def _quoted(name: object) -> str:
    return repr(name) if isinstance(name, str) else _shown(name)


def _instead(name: object, known: Iterable[str]) -> str:
    """Advice on an unknown key."""
    names = list(known)
    if isinstance(name, str):
        bare = name.lower().strip().lstrip("-").replace("-", "_")
        near = difflib.get_close_matches(bare, names, 1)
        other = _OTHER_NAMES.get(bare)
        if other in names:
            return f"did you mean {other!r}?"
        if near:
            return f"did you mean {near[0]!r}?"
    return f"the keys are {', '.join(names)}"


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain data, such as `Recipe.resolved()` gives.

    Raises:
        RecipeError: a key is unknown, missing, malformed, or contradicts another.
    """
    for key in values:
        if key not in _KEYS:
            raise RecipeError(f"unknown key {_quoted(key)}: {_instead(key, _KEYS)}")
    for key, meaning in (("model", "the converted checkpoint"), ("output", "a folder for the run"), ("data", "the training text")):
        if key not in values:
            raise RecipeError(f"the recipe has no key {key!r}: give {meaning}")
    recipe = Recipe(**{key: _KEYS[key](key, value) for key, value in values.items()})
    if recipe.teacher is not None and recipe.distillation_weight is None:
        recipe = dataclasses.replace(recipe, distillation_weight=1.0)
    _check_budget(recipe)
    _check_folders(recipe)
    _check_teacher(recipe)
    if recipe.document_mask and recipe.objective in ("span_corruption", "ul2"):
        raise RecipeError(f"document_mask belongs to the causal objective, and objective is {recipe.objective}: remove one of them")
    if recipe.evaluate_every is not None and recipe.evaluation_data is None:
        raise RecipeError(f"evaluate_every is {recipe.evaluate_every} and there is no evaluation_data: name text to evaluate on")
    return recipe


def _check_budget(recipe: Recipe) -> None:
    if recipe.tokens is not None and (recipe.alpha is not None or recipe.pretraining_tokens is not None):
        second = "alpha" if recipe.alpha is not None else "pretraining_tokens"
        raise RecipeError(f"tokens and {second} both state the budget: keep tokens, or alpha with pretraining_tokens")
    if recipe.tokens is None and (recipe.alpha is None or recipe.pretraining_tokens is None):
        if recipe.alpha is None and recipe.pretraining_tokens is None:
            raise RecipeError("the recipe states no budget: give tokens (such as 2B), or alpha with pretraining_tokens")
        given, missing = ("alpha", "pretraining_tokens") if recipe.pretraining_tokens is None else ("pretraining_tokens", "alpha")
        raise RecipeError(f"{given} is given without {missing}: give both, or tokens alone")
    if recipe.sequence_length is not None and recipe.tokens_per_step < recipe.sequence_length:
        raise RecipeError(
            f"tokens_per_step is {recipe.tokens_per_step} and sequence_length is {recipe.sequence_length}: "
            "a step must hold at least one sequence"
        )
    if recipe.budget_tokens < recipe.tokens_per_step:
        raise RecipeError(
            f"the budget is {recipe.budget_tokens} tokens and tokens_per_step is {recipe.tokens_per_step}: "
            "raise the budget or lower tokens_per_step"
        )


def _check_folders(recipe: Recipe) -> None:
    output = _resolved("output", recipe.output)
    for key in ("model", "teacher"):
        value = getattr(recipe, key)
        if value is None:
            continue
        folder = _resolved(key, value)
        if folder == output:
            raise RecipeError(f"output and {key} are the same folder {value}: name a new folder for output")
        if folder.is_dir() and (folder in output.parents or output in folder.parents):
            raise RecipeError(f"output {recipe.output} and {key} {value} lie one inside the other: name a folder beside it for output")
    if output.exists() and not output.is_dir():
        raise RecipeError(f"output {recipe.output} is a file: name a folder")
    if recipe.teacher is not None and os.path.normpath(recipe.teacher) == os.path.normpath(recipe.model):
        raise RecipeError(f"teacher and model are both {recipe.model}: the teacher is the checkpoint that the model was converted from")


def _resolved(key: str, path: str) -> Path:
    try:
        place = Path(path).resolve()
        place.exists()
    except (OSError, RuntimeError) as problem:  # a name that is too long, a loop of links
        raise RecipeError(f"{key} {_shown(path)} is no path: {getattr(problem, 'strerror', None) or problem}") from None
    return place


def _check_teacher(recipe: Recipe) -> None:
    if recipe.teacher is not None:
        return
    unused = Recipe(model="", output="", data=())
    for key in ("distillation_weight", "temperature", "teacher_top_k", "teacher_dtype", "attention_matching"):
        if getattr(recipe, key) != getattr(unused, key):
            raise RecipeError(f"{key} is given without a teacher: name the source checkpoint as teacher, or remove {key}")


class _Loader(yaml.SafeLoader):
    """YAML without surprises: scalars are text, true, false or null; no key twice, no aliases, no tags."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not used here", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem=f"tags such as {event.tag} are not used here", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"a key must be a word, not {_shown(key)}", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice, first in line {seen[key]}", problem_mark=key_node.start_mark)
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text else ""
        raise RecipeError(f"{where}{line}: {problem.problem or problem.context}: correct it") from None
    except yaml.YAMLError as problem:  # characters that YAML does not allow
        raise RecipeError(f"{where} is no YAML: {str(problem).splitlines()[0]}") from None
    except RecursionError:
        raise RecipeError(f"{where} is nested too deeply: a recipe is a flat list of keys") from None


def _read_file(path: Path) -> Any:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}: give the path of a YAML file") from None
    except OSError as problem:
        raise RecipeError(f"the recipe {path} can't be read: {problem.strerror or problem}") from None
    if len(raw) > _LONGEST_FILE:
        raise RecipeError(f"{path} has {len(raw)} bytes, which is no recipe: give the path of a YAML file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise RecipeError(f"{path} is no UTF-8 text (byte {problem.start}): give the path of a YAML file") from None
    loaded = _load(text + "\n", str(path))
    if loaded is None or loaded == "":
        raise RecipeError(f"{path} is empty: a recipe has at least the keys model, output, data and tokens")
    if not isinstance(loaded, dict):
        raise RecipeError(f"{path} holds {'a list' if isinstance(loaded, list) else 'text'}: a recipe is a list of lines `key: value`")
    return loaded


def _read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, sign, text = override.partition("=")
        key = key.strip()
        if not sign or not key:
            raise RecipeError(f"the override {override!r} has no key and value: write it as key=value")
        if key not in _KEYS:
            raise RecipeError(f"the override {override!r} has an unknown key {key!r}: {_instead(key, _KEYS)}")
        if key in values:
            raise RecipeError(f"the override {key} is given twice: give it once")
        values[key] = _load(text, f"the override {override!r}")
    return values


def read_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file.

    Args:
        path: of the file.
        overrides: `key=value`, the value written as in the file; they replace what the file says. A budget stated here replaces the
            file's, however that one is stated.

    Raises:
        RecipeError: the file or an override can't be read, or the recipe makes no sense.
    """
    values = dict(_read_file(Path(path)))
    changes = _read_overrides(overrides)
    if changes.get("tokens") is not None:
        values = {key: value for key, value in values.items() if key not in ("alpha", "pretraining_tokens")}
    elif changes.get("alpha") is not None and (changes.get("pretraining_tokens") or values.get("pretraining_tokens")) is not None:
        values.pop("tokens", None)
    try:
        return make_recipe(values | changes)
    except RecipeError as mistake:
        raise RecipeError(f"{path}: {mistake}") from None
