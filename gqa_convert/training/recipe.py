"""The recipe of an uptraining run: a validated, frozen `Recipe`; `recipe_files` reads it from a file.

Everything that can be refused without loading a model or a text is refused here, in one line for each mistake.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, TypeAdapter, WithJsonSchema
from pydantic.dataclasses import dataclass

from gqa_convert.data.keys import (
    CONFIG,
    Change,
    Flag,
    PathText,
    Real,
    Text,
    Tokens,
    Whole,
    fields_of,
    key,
    read_keys,
)
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.data.scalars import shown
from gqa_convert.data.sources import KINDS, Source, SourceKind, Sources, pinned
from gqa_convert.errors import RecipeError

Schedule = Literal["constant", "cosine", "wsd"]
OptimizerName = Literal["adamw", "adafactor"]
Precision = Literal["bf16", "no"]
Sharding = Literal["auto", "replicate", "full"]
Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""The experiment trackers that accelerate supports."""


def _read_trackers(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_objective(name: str) -> str:
    if name not in ("auto", *OBJECTIVES):
        raise ValueError(f"it must be auto, {', '.join(OBJECTIVES)}")
    return name


ObjectiveName = Annotated[
    Text, AfterValidator(_check_objective), WithJsonSchema({"enum": ["auto", *OBJECTIVES], "type": "string"})
]
Trackers = Annotated[
    tuple[Tracker, ...],
    BeforeValidator(_read_trackers, json_schema_input_type=Tracker | list[Tracker]),
]
"""One tracker or a list of them."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Lora:
    """The recipe's key `lora`: low-rank adapters (Hu et al. 2021) on every linear layer but the output layer of a model
    whose own weights stay fixed.
    """

    rank: Whole = key("The rank of each adapter.", default=64, ge=1, le=2**16, aliases=("r", "lora_r"))
    alpha: Real | None = key(
        "The adapters' output is scaled by `alpha / rank`. The default is the rank.",
        default=None,
        gt=0,
        aliases=("lora_alpha",),
    )
    dropout: Real = key("The dropout of the adapters' input.", default=0.0, ge=0, lt=1, aliases=("lora_dropout",))
    quantize: Literal["nf4"] | None = key(
        "`nf4` keeps the fixed weights in 4 bits (QLoRA, Dettmers et al. 2023); needs bitsandbytes.",
        default=None,
        aliases=("load_in_4bit", "quantization"),
    )

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def __str__(self) -> str:
        base = f" on weights in {self.quantize}" if self.quantize else ""
        return f"LoRA of rank {self.rank}{base}"


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Recipe:
    """The settings of an uptraining run. `read_recipe` and `make_recipe` create and validate recipes."""

    model: PathText = key("The converted checkpoint: a folder or a Hub id.", aliases=("source",))
    output: PathText = key(
        "The folder of the run: its checkpoints, its log and the trained model.",
        change="bookkeeping",
        aliases=("output_dir", "out"),
    )
    data: Sources = key(
        "The training text; see [sources of text](#sources-of-text).",
        aliases=("dataset", "datasets"),
    )
    objective: ObjectiveName = key("What the model learns to predict; see [objectives](#objectives).", default="auto")
    sequence_length: Tokens | None = key(
        "The length of a sample, which each [objective](#objectives) defines. The default is the model's context, up to "
        "2048, and up to 512 for encoder-decoders.",
        default=None,
        ge=2,
        le=2**24,
        aliases=("max_length", "max_seq_length", "block_size"),
    )
    micro_batch_size: Whole = key(
        "Samples per process and forward pass. It changes memory and speed, not the meaning of the result.",
        default=1,
        ge=1,
        le=2**20,
        change="execution",
    )
    tokens: Tokens | None = key(
        "The training budget.",
        default=None,
        ge=1,
        change="budget",
        aliases=("max_steps", "steps", "num_train_epochs", "epochs"),
    )
    alpha: Real | None = key(
        "The training budget as a share of `pretraining_tokens`.", default=None, gt=0, le=1, change="budget"
    )
    pretraining_tokens: Tokens | None = key(
        "How many tokens the source was pretrained on.", default=None, ge=1, change="budget"
    )
    tokens_per_step: Tokens = key(
        "The batch of one optimizer step over all processes, rounded to whole samples.",
        default=65536,
        ge=1,
        aliases=("batch_size", "gradient_accumulation_steps"),
    )
    learning_rate: Real = key("The peak learning rate.", default=2e-4, gt=0, le=1, change="recorded", aliases=("lr",))
    warmup_steps: Whole | None = key(
        "The length of the linear warm-up. The default is 2% of all steps, at most 1000.",
        default=None,
        ge=0,
        aliases=("warmup",),
    )
    schedule: Schedule = key(
        "The learning rate after the warm-up; see [schedules](#schedules).",
        default="cosine",
        aliases=("lr_scheduler_type",),
    )
    final_learning_rate: Real = key(
        "The share of `learning_rate` that `cosine` and `wsd` end at.", default=0.1, ge=0, le=1
    )
    decay_share: Real = key("The share of the steps in which `wsd` decays.", default=0.2, gt=0, le=1)
    optimizer: OptimizerName = key("The optimizer; see [optimizers](#optimizers).", default="adamw")
    weight_decay: Real = key("Decoupled weight decay, of matrices only.", default=0.0, ge=0, le=10)
    gradient_clipping: Real | None = key(
        "The largest norm of all gradients together; `null` for none.",
        default=1.0,
        gt=0,
        change="recorded",
        aliases=("max_grad_norm",),
    )
    precision: Precision = key(
        "`bf16` computes in bfloat16; weights and optimizer states are float32 in any case.",
        default="bf16",
        change="recorded",
        aliases=("mixed_precision",),
    )
    gradient_checkpointing: Flag = key(
        "Recompute activations in the backward pass: less memory, a third more time.", default=False, change="execution"
    )
    sharding: Sharding = key(
        "How the processes share the model; see [sharding](#sharding). `auto` is what the launcher's configuration asks "
        "for.",
        default="auto",
        change="execution",
        aliases=("fsdp", "sharding_strategy"),
    )
    lora: Lora | None = key(
        "Train low-rank adapters instead of the weights; see [adapters](#adapters).",
        default=None,
        aliases=("peft", "adapter", "qlora"),
    )
    seed: Whole = key("The seed of the order of samples, of corruption and of dropout.", default=0, ge=0, le=2**32 - 1)
    save_every: Whole = key("The interval between checkpoints.", default=500, ge=1, change="bookkeeping")
    keep_checkpoints: Whole = key(
        "How many of the newest checkpoints are kept.",
        default=2,
        ge=1,
        change="bookkeeping",
        aliases=("save_total_limit",),
    )
    evaluate_every: Whole | None = key(
        "The interval between evaluations; by default only at the start and at the end.",
        default=None,
        ge=1,
        change="bookkeeping",
    )
    evaluation_data: Sources | None = key("Held-out text to evaluate on.", default=None, change="bookkeeping")
    evaluation_tokens: Tokens = key(
        "How much of the held-out text is used.", default=131072, ge=1, change="bookkeeping"
    )
    z_loss: Real = key(
        "The weight of log(Z)^2 in the loss, where Z is the normaliser of the softmax. T5 was pretrained with 1e-4.",
        default=0.0,
        ge=0,
        le=1,
    )
    teacher: PathText | None = key("The source checkpoint, to distil from: a folder or a Hub id.", default=None)
    distillation_weight: Real | None = key(
        "The weight of the match with the teacher; the language-model loss has the rest of 1. The default is 1.0 with a "
        "teacher.",
        default=None,
        ge=0,
        le=1,
    )
    trackers: Trackers = key(
        "Experiment trackers of accelerate to report to, besides the log file.",
        default=(),
        change="bookkeeping",
        aliases=("report_to",),
    )
    tracker_project: Text = key("The project of the trackers.", default="gqa-convert", change="bookkeeping")
    log_every: Whole = key("The interval between lines of the log.", default=1, ge=1, change="bookkeeping")

    @property
    def budget_tokens(self) -> int:
        """The training budget in tokens of text, whichever keys state it."""
        if self.tokens is not None:
            return self.tokens
        assert self.alpha is not None
        assert self.pretraining_tokens is not None
        return round(Fraction(repr(self.alpha)) * self.pretraining_tokens)

    def pinned(self, commits: Mapping[str, str]) -> "Recipe":
        """The recipe with the commits of Hub datasets as their revisions.

        Args:
            commits: by dataset and revision, as `find_commits` returns them.
        """
        evaluation = None if self.evaluation_data is None else pinned(self.evaluation_data, commits)
        return dataclasses.replace(self, data=pinned(self.data, commits), evaluation_data=evaluation)

    def samples_per_step(self, tokens_per_sample: int | Fraction) -> int:
        """Samples of a step over all processes: the whole number nearest to `tokens_per_step`, at least one."""
        return max(1, (2 * self.tokens_per_step + tokens_per_sample) // (2 * tokens_per_sample))

    def steps(self, tokens_per_sample: int | Fraction) -> int:
        """The smallest number of whole steps that covers the budget."""
        return -(-self.budget_tokens // (self.samples_per_step(tokens_per_sample) * tokens_per_sample))

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run with so many steps.

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
        """All keys as plain data, including defaults; `make_recipe` restores the recipe from it."""
        plain: dict[str, Any] = TypeAdapter(Recipe).dump_python(self, mode="json")
        return plain

    def differences(self, other: "Recipe", *, free: Collection[str], may_grow: bool = True) -> list[str]:
        """The keys in which another recipe differs.

        Args:
            other: the recipe to resume with.
            free: keys that may differ in any way.
            may_grow: whether the budget may differ, unless it shrinks.

        Returns:
            A phrase for each such key, such as "seed was 0 and is now 1".
        """
        found = []
        for name in KEYS:
            before, after = getattr(self, name), getattr(other, name)
            if before != after and name not in free and not (may_grow and name in BUDGET):
                found.append(f"{name} was {_brief(before)} and is now {_brief(after)}")
        if may_grow and other.budget_tokens < self.budget_tokens:
            found.append(f"the budget was {self.budget_tokens} tokens and is now {other.budget_tokens}")
        return found


def _brief(value: Any) -> str:
    """A value for a message, without the defaults of sources."""
    if isinstance(value, tuple):
        return shown([each.stated() if isinstance(each, Source) else each for each in value])
    return shown(value)


NESTED = {"data": Source, "evaluation_data": Source, "lora": Lora}
"""The keys that hold mappings with keys of their own."""
KEYS = tuple(fields_of(Recipe))


def _that_change(*when: Change) -> frozenset[str]:
    return frozenset(name for name, each in fields_of(Recipe).items() if each.json_schema_extra["change"] in when)


BUDGET = _that_change("budget")
"""The keys that state how long training lasts."""
RECORDED = _that_change("recorded")
"""The keys that help a run that has diverged; a change is recorded with its step."""
CHANGEABLE = RECORDED | _that_change("bookkeeping", "execution")
"""The keys that a resumed run may change."""


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain data, such as `Recipe.resolved()` returns.

    Raises:
        RecipeError: a key is unknown, missing, malformed, or contradicts another; a line for each mistake.
    """
    try:
        recipe: Recipe = read_keys(Recipe, dict(values), NESTED)
    except ValueError as problem:
        raise RecipeError(str(problem)) from None
    mistakes = [*_budget_mistakes(recipe), *_folder_mistakes(recipe), *_source_mistakes(recipe)]
    if recipe.evaluate_every is not None and recipe.evaluation_data is None:
        mistakes.append(
            f"evaluate_every is {recipe.evaluate_every} and there is no evaluation_data: name text to evaluate on"
        )
    if recipe.teacher is None and recipe.distillation_weight is not None:
        mistakes.append(
            "distillation_weight is given without a teacher: name the source checkpoint as teacher, or remove distillation_weight"
        )
    if mistakes:
        raise RecipeError("\n".join(mistakes))
    if recipe.teacher is not None and recipe.distillation_weight is None:
        recipe = dataclasses.replace(recipe, distillation_weight=1.0)
    return recipe


def _budget_mistakes(recipe: Recipe) -> Iterator[str]:
    stated = [name for name in ("tokens", "alpha", "pretraining_tokens") if getattr(recipe, name) is not None]
    if stated not in (["tokens"], ["alpha", "pretraining_tokens"]):
        yield f"the budget is stated by {' and '.join(stated) or 'no key'}: give tokens alone (such as 2B), or alpha with pretraining_tokens"
        return
    if recipe.sequence_length is not None and recipe.tokens_per_step < recipe.sequence_length:
        yield (
            f"tokens_per_step is {recipe.tokens_per_step} and sequence_length is {recipe.sequence_length}: "
            "a step must hold at least one sequence"
        )
    if recipe.budget_tokens < recipe.tokens_per_step:
        yield (
            f"the budget is {recipe.budget_tokens} tokens and tokens_per_step is {recipe.tokens_per_step}: "
            "raise the budget or lower tokens_per_step"
        )


def _folder_mistakes(recipe: Recipe) -> Iterator[str]:
    output = Path(os.path.realpath(recipe.output))
    if output.is_file():
        yield f"output {recipe.output} is a file: name a folder"
    for name, stated in (("model", recipe.model), ("teacher", recipe.teacher)):
        folder = Path(os.path.realpath(stated or recipe.model))
        nested = output.is_relative_to(folder) or folder.is_relative_to(output)
        if folder == output or (nested and folder.is_dir()):
            yield f"output {recipe.output} and {name} {stated} are the same folder or nested: name a separate folder for output"
    if recipe.teacher is not None and Path(recipe.teacher) == Path(recipe.model):
        yield (
            f"teacher and model are both {recipe.model}: the teacher is the checkpoint that the model was converted from"
        )


def _source_mistakes(recipe: Recipe) -> Iterator[str]:
    """Sources whose keys contradict one another, the other sources or the objective."""
    named: dict[str, Source] = {}
    for key_name, sources in (("data", recipe.data), ("evaluation_data", recipe.evaluation_data or ())):
        for number, source in enumerate(sources):
            named[key_name if len(sources) == 1 else f"{key_name}[{number}]"] = source
    first = recipe.data[0].kind
    reads: tuple[SourceKind, ...] = ("pairs",) if first == "pairs" else ("text", "chat")
    reason = f"data holds {KINDS[first]}"
    if recipe.objective != "auto":
        reads, reason = OBJECTIVES[recipe.objective].reads, f"objective is {recipe.objective}"
    for name, source in named.items():
        for mistake in _contradictions(source):
            yield f"{name} {mistake}"
        if source.is_self and name.startswith("evaluation_data"):
            yield f"{name} is self, text that the source writes: name real text, on which a loss means something"
        if source.kind not in reads:
            wanted = " or ".join(KINDS[kind] for kind in reads)
            yield f"{reason}, and {name} holds {KINDS[source.kind]}: name {wanted}, or change objective"


def _contradictions(source: Source) -> Iterator[str]:
    """What is wrong with the keys of one source; phrases that follow its name."""
    stated = source.stated()
    if ("source_field" in stated) != ("target_field" in stated):
        yield "names only one of source_field and target_field: give both, or neither"
    elsewhere: dict[str, str] = {}
    if source.kind == "pairs":
        elsewhere["text_field"] = "running text"
    if source.format == "text":
        elsewhere |= dict.fromkeys(("messages_field", "loss_on"), "conversations")
    if not source.is_self:
        elsewhere |= dict.fromkeys(("tokens", "temperature", "seed"), "text of the model itself (source: self)")
    for name, owner in elsewhere.items():
        if name in stated:
            yield f"has {name}, which belongs to {owner}: remove {name}"
