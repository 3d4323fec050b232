"""What a recipe is: its keys as typed fields, and what follows from them."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any, Literal

from gqa_convert.errors import RecipeError
from gqa_convert.training.recipe import readers

Objective = Literal["auto", "causal", "span_corruption", "ul2", "text_infilling", "pairs"]
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
    "output",
    "save_every",
    "keep_checkpoints",
    "evaluate_every",
    "evaluation_data",
    "evaluation_tokens",
    "trackers",
    "log_every",
)
"""Keys that leave the trained weights as they are: a resumed run may change them."""

EXECUTION = ("micro_batch_size", "gradient_checkpointing", "compile")
"""Keys that change rounding, memory and speed alone: a run that ran out of memory may go on with others."""


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
    source_field: str | None = None
    """For pairs of texts: the column of what the encoder reads."""
    target_field: str | None = None
    """The column of what the decoder is to write."""
    source_language: str | None = None
    """Where the tokenizer marks languages: that of the texts that are read."""
    target_language: str | None = None
    """That of the texts that are to be written."""

    @property
    def holds_pairs(self) -> bool:
        """Whether it is pairs of texts, and not running text."""
        return self.source_field is not None


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
    """`auto` is next-token prediction for decoders; for encoder-decoders pairs where the data name their fields, or
    else span corruption or text infilling, whichever the tokenizer has tokens for."""
    sequence_length: int | None = None
    """Tokens of a sample, of either text of a pair at most; by default the model's context up to 2048, and up to 512
    for encoder-decoders."""
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
    """Probability in every dropout of the model, in place of its config's: uptraining goes on with pretraining, which
    T5 1.1 and most decoders did without."""
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

    def samples_per_step(self, tokens_per_sample: int | Fraction) -> int:
        """Sequences of a step over all processes: the whole number nearest to `tokens_per_step`, at least one."""
        return max(1, (2 * self.tokens_per_step + tokens_per_sample) // (2 * tokens_per_sample))

    def steps(self, tokens_per_sample: int | Fraction) -> int:
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
    ) -> tuple[str, ...]:
        """What speaks against resuming a run of this recipe with another one.

        Args:
            other: the recipe to go on with.
            may_grow: keys that may differ as long as the number that they state, or the budget that they state
                together, does not shrink.
            may_change: keys that may differ in any way.

        Returns:
            A phrase for each key in the way, such as "seed was 0 and is now 1"; nothing where the run can go on.
        """
        before, after = self.resolved(), other.resolved()
        growing, free = set(may_grow), set(may_change)
        keys = [key for key in before if before[key] != after[key] and key not in free]
        found = [
            f"{key} was {readers.shown(_brief(before[key]))} and is now {readers.shown(_brief(after[key]))}"
            for key in keys
            if not (key in growing and (key in BUDGET or _grown(before[key], after[key])))
        ]
        if growing & {*BUDGET} & {*keys} and other.budget_tokens < self.budget_tokens:
            found.append(f"the budget was {self.budget_tokens} tokens and is now {other.budget_tokens}")
        return tuple(found)


def _grown(before: object, after: object) -> bool:
    return isinstance(before, int | float) and isinstance(after, int | float) and after >= before


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
