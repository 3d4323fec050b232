"""The recipe: its keys, each declared once, and values derived from them."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any, Literal

from gqa_convert.errors import RecipeError
from gqa_convert.text.dataset_commits import pinned
from gqa_convert.text.keys import TOKENS, Change, key, keys_of
from gqa_convert.text.objectives import ObjectiveName
from gqa_convert.text.scalars import shown
from gqa_convert.text.sources import Source, read_sources
from gqa_convert.training.recipe.lora import Lora, read_lora

Schedule = Literal["constant", "cosine", "wsd"]
OptimizerName = Literal["adamw", "adafactor"]
Precision = Literal["bf16", "no"]
Trainable = Literal["all", "attention", "kv"]
Sharding = Literal["auto", "replicate", "full", "hybrid"]
TeacherDtype = Literal["bf16", "float32", "auto"]

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""The experiment trackers that accelerate supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of an uptraining run. `read_recipe` and `make_recipe` create and validate recipes."""

    model: str = key("The converted checkpoint: a folder or a Hub id.", path=True, aliases=("source",))
    output: str = key(
        "The folder of the run: its checkpoints, its log and the trained model.",
        path=True,
        change="bookkeeping",
        aliases=("output_dir", "out"),
    )
    data: tuple[Source, ...] = key(
        "The training text; see [sources of text](#sources-of-text).",
        reader=read_sources,
        aliases=("dataset", "datasets"),
    )
    objective: Literal["auto", ObjectiveName] = key(
        "What the model learns to predict; see [objectives](#objectives).", default="auto"
    )
    sequence_length: int | None = key(
        "The length of a sample, which each [objective](#objectives) defines. The default is the model's context, up to "
        "2048, and up to 512 for encoder-decoders.",
        default=None,
        least=2,
        most=2**24,
        unit=TOKENS,
        aliases=("max_length", "max_seq_length", "block_size"),
    )
    micro_batch_size: int = key(
        "Samples per process and forward pass. It changes memory and speed, not the meaning of the result.",
        default=1,
        most=2**20,
        unit="samples",
        change="execution",
    )
    tokens: int | None = key(
        "The training budget.",
        default=None,
        unit=TOKENS,
        change="budget",
        aliases=("max_steps", "steps", "num_train_epochs", "epochs"),
    )
    alpha: float | None = key(
        "The training budget as a share of `pretraining_tokens`.", default=None, above=0, most=1, change="budget"
    )
    pretraining_tokens: int | None = key(
        "How many tokens the source was pretrained on.", default=None, unit=TOKENS, change="budget"
    )
    tokens_per_step: int = key(
        "The batch of one optimizer step over all processes, rounded to whole samples.",
        default=65536,
        unit=TOKENS,
        aliases=("batch_size", "gradient_accumulation_steps"),
    )
    learning_rate: float = key(
        "The peak learning rate.", default=2e-4, above=0, most=1, change="recorded", aliases=("lr",)
    )
    warmup_steps: int | None = key(
        "The length of the linear warm-up. The default is 2% of all steps, at most 1000.",
        default=None,
        least=0,
        unit="steps",
        aliases=("warmup",),
    )
    schedule: Schedule = key(
        "The learning rate after the warm-up; see [schedules](#schedules).",
        default="cosine",
        aliases=("lr_scheduler_type",),
    )
    final_learning_rate: float = key(
        "The share of `learning_rate` that `cosine` and `wsd` end at.", default=0.1, least=0, most=1
    )
    decay_share: float = key("The share of the steps in which `wsd` decays.", default=0.2, above=0, most=1)
    optimizer: OptimizerName = key("The optimizer; see [optimizers](#optimizers).", default="adamw")
    weight_decay: float = key("Decoupled weight decay, of matrices only.", default=0.0, least=0, most=10)
    beta1: float = key("The first beta of AdamW.", default=0.9, least=0, below=1)
    beta2: float = key("The second beta of AdamW.", default=0.95, least=0, below=1)
    gradient_clipping: float | None = key(
        "The largest norm of all gradients together; `null` for none.",
        default=1.0,
        above=0,
        change="recorded",
        aliases=("max_grad_norm",),
    )
    precision: Precision = key(
        "`bf16` computes in bfloat16; weights and optimizer states are float32 in any case.",
        default="bf16",
        change="recorded",
        aliases=("mixed_precision",),
    )
    gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass: less memory, a third more time.", default=False, change="execution"
    )
    sharding: Sharding = key(
        "How the processes share the model; see [sharding](#sharding). `auto` is what the launcher's configuration asks "
        "for.",
        default="auto",
        change="execution",
        aliases=("fsdp", "sharding_strategy"),
    )
    shard_size: int | None = key(
        "With `sharding: hybrid`, how many processes share one copy of the model. The default is those of a machine.",
        default=None,
        least=2,
        unit="processes",
        change="execution",
        aliases=("hsdp_shard_size", "dp_shard_size", "fsdp_size", "data_parallel_shard_degree"),
    )
    trainable: Trainable = key(
        "Which parameters are trained; see [trained parameters](#what-is-trained).", default="all"
    )
    lora: Lora | None = key(
        "Train low-rank adapters instead of the weights; see [adapters](#adapters).",
        default=None,
        reader=read_lora,
        reads="mapping",
        aliases=("peft", "adapter", "qlora"),
    )
    dropout: float = key(
        "The probability of every dropout of the model, in place of its config's. Uptraining continues pretraining, "
        "which T5 1.1 and most decoders did without dropout.",
        default=0.0,
        least=0,
        below=1,
    )
    seed: int = key(
        "The seed of the order of samples, of corruption and of dropout.", default=0, least=0, most=2**32 - 1
    )
    save_every: int = key("The interval between checkpoints.", default=500, unit="steps", change="bookkeeping")
    keep_checkpoints: int = key(
        "How many of the newest checkpoints are kept.", default=2, change="bookkeeping", aliases=("save_total_limit",)
    )
    evaluate_every: int | None = key(
        "The interval between evaluations; by default only at the start and at the end.",
        default=None,
        unit="steps",
        change="bookkeeping",
    )
    evaluation_data: tuple[Source, ...] | None = key(
        "Held-out text to evaluate on.", default=None, reader=read_sources, change="bookkeeping"
    )
    evaluation_tokens: int = key(
        "How much of the held-out text is used.", default=131072, unit=TOKENS, change="bookkeeping"
    )
    z_loss: float = key(
        "The weight of log(Z)^2 in the loss, where Z is the normaliser of the softmax. T5 was pretrained with 1e-4.",
        default=0.0,
        least=0,
        most=1,
    )
    teacher: str | None = key("The source checkpoint, to distil from: a folder or a Hub id.", default=None, path=True)
    distillation_weight: float | None = key(
        "The weight of the match with the teacher; the language-model loss has the rest of 1. The default is 1.0 with a "
        "teacher.",
        default=None,
        least=0,
        most=1,
        needs_teacher=True,
    )
    teacher_dtype: TeacherDtype = key(
        "The type of the teacher's weights: `auto` is that of its checkpoint, and on a GPU bf16 instead of float32, whose "
        "effect on the teacher's predictions is measured and reported.",
        default="auto",
        needs_teacher=True,
    )
    document_mask: bool = key(
        "Tokens attend to their own document only, in training and in evaluation; see "
        "[documents in one row](#documents-in-one-row).",
        default=False,
    )
    trackers: tuple[str, ...] = key(
        "Experiment trackers of accelerate to report to, besides the log file.",
        default=(),
        choices=TRACKERS,
        change="bookkeeping",
        aliases=("report_to",),
    )
    tracker_project: str = key("The project of the trackers.", default="gqa-convert", change="bookkeeping")
    log_every: int = key("The interval between lines of the log.", default=1, unit="steps", change="bookkeeping")

    @property
    def budget_tokens(self) -> int:
        """The training budget in tokens of text, whichever keys state it."""
        if self.tokens is not None:
            return self.tokens
        assert self.alpha is not None
        assert self.pretraining_tokens is not None
        share = Decimal(repr(self.alpha)) * self.pretraining_tokens
        return int(share.to_integral_value(ROUND_HALF_UP))

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
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def differences(
        self, other: "Recipe", may_grow: Iterable[str] | None = None, may_change: Iterable[str] | None = None
    ) -> tuple[str, ...]:
        """The keys that keep another recipe from resuming a run of this one.

        Args:
            other: the recipe to resume with.
            may_grow: keys that may differ as long as the number that they state, or the budget that they state
                together, does not shrink; by default BUDGET.
            may_change: keys that may differ in any way; by default CHANGEABLE.

        Returns:
            A phrase for each such key, such as "seed was 0 and is now 1".
        """
        growing = set(BUDGET if may_grow is None else may_grow)
        free = CHANGEABLE if may_change is None else set(may_change)
        before, after = self.resolved(), other.resolved()
        keys = [name for name in before if before[name] != after[name] and name not in free]
        found = [
            f"{name} was {shown(_brief(before[name]))} and is now {shown(_brief(after[name]))}"
            for name in keys
            if not (name in growing and (name in BUDGET or _grown(before[name], after[name])))
        ]
        if growing & {*BUDGET} & {*keys} and other.budget_tokens < self.budget_tokens:
            found.append(f"the budget was {self.budget_tokens} tokens and is now {other.budget_tokens}")
        return tuple(found)


KEYS = keys_of(Recipe)
"""The declarations of all keys, by name, in their order."""


def _that_change(when: Change) -> tuple[str, ...]:
    return tuple(name for name, each in KEYS.items() if each.change == when)


BUDGET = _that_change("budget")
"""The keys that state how long training lasts."""
BOOKKEEPING = _that_change("bookkeeping")
"""The keys that the trained weights do not depend on."""
EXECUTION = _that_change("execution")
"""The keys that only rounding, memory and speed depend on."""
RECORDED = frozenset(_that_change("recorded"))
"""The keys that help a run that has diverged; a change is recorded with its step."""
CHANGEABLE = frozenset({*BOOKKEEPING, *EXECUTION, *RECORDED})
"""The keys that a resumed run may change."""


def _grown(before: object, after: object) -> bool:
    return isinstance(before, int | float) and isinstance(after, int | float) and after >= before


def _brief(value: Any) -> Any:
    """Plain data, with sources of text as a recipe would state them: without defaults."""
    if isinstance(value, list):
        return f"[{', '.join(str(_brief(item)) for item in value)}]" if len(value) != 1 else _brief(value[0])
    if not isinstance(value, dict) or "source" not in value:
        return value
    if "source" not in value:
        return f"{{{', '.join(f'{name}: {item}' for name, item in value.items())}}}"
    stated = {name: value[name] for name, each in keys_of(Source).items() if value[name] != each.default}
    return (
        value["source"] if len(stated) == 1 else f"{{{', '.join(f'{name}: {item}' for name, item in stated.items())}}}"
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
