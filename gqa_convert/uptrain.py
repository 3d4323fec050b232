"""Takes a converted checkpoint back to its source's quality: everything around the training loop, from the recipe to the trained model."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.errors import CorruptCheckpointError, RecipeError, ResumeError, StoppedError
from gqa_convert.loading import load_model, load_tokenizer, no_bars
from gqa_convert.recipe import Recipe, make_recipe, read_recipe

OnStep = Callable[[dict[str, Any]], None]
"""Called on the main process with every line of the metrics file, and `steps` of the whole run."""


def uptrain(
    path: str | Path,
    overrides: list[str],
    *,
    on_message: Callable[[str], None] = lambda _: None,
    on_step: OnStep = lambda _: None,
    on_tokenize: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> dict[str, Any]:
    """Run a recipe, from its newest checkpoint if there is one.

    Args:
        path: of the recipe.
        overrides: `key=value`.
        on_message: called with what happens between the steps.
        on_step: called after every step.
        on_tokenize: called with a source of text, the bytes tokenised and their total.

    Returns:
        The summary that is also in `output/summary.json`.

    Raises:
        RecipeError: the recipe is wrong.
        LaunchError: the processes are not those that were meant.
        ResumeError: the output holds a run that this one can't go on from.
        DataError: the text can't be used.
        DivergedError: training produced numbers that are not finite.
        StoppedError: a signal asked to stop, and the state is saved.
    """
    recipe = read_recipe(path, overrides)
    from gqa_convert.training.distributed import taking_part

    with taking_part(), no_bars():
        return _Run(recipe, _Setup.make(recipe), on_message, on_step, on_tokenize).go()


@dataclass(frozen=True)
class _Setup:
    """What a recipe names, looked at before anything large is loaded."""

    accelerator: Any
    student: Checkpoint
    student_folder: Path
    teacher_folder: Path | None
    source_folder: Path | None
    """The checkpoint that the student was converted from, if it lies on this machine."""
    objective: str
    sequence_length: int
    lock: Any

    @classmethod
    def make(cls, recipe: Recipe) -> "_Setup":
        from gqa_convert.training.distributed import join, together

        trackers = str(Path(recipe.output) / "trackers") if recipe.trackers else None
        accelerator = join(log_with=list(recipe.trackers) or None, project_dir=trackers)
        with together(accelerator):
            return cls._look(recipe, accelerator)

    @classmethod
    def _look(cls, recipe: Recipe, accelerator: Any) -> "_Setup":
        from gqa_convert.training.distributed import OutputLock

        student = open_checkpoint(recipe.model, download=True)
        teacher = None if recipe.teacher is None else open_checkpoint(recipe.teacher, download=True).folder
        assert student.folder is not None
        if teacher is not None:
            from gqa_convert.training.teacher import shared_vocabulary

            shared_vocabulary(student.folder, teacher)
        objective, length = _objective(recipe, student)
        lock = OutputLock(Path(recipe.output)) if accelerator.is_main_process else None
        return cls(accelerator, student, student.folder, teacher, teacher or _source_of(student), objective, length, lock)


def _objective(recipe: Recipe, student: Checkpoint) -> tuple[str, int]:
    """The objective and the length of a sample, where the recipe leaves them open."""
    config = student.config
    seq2seq = bool(config.get("is_encoder_decoder"))
    objective = recipe.objective
    if objective == "auto":
        objective = "span_corruption" if seq2seq else "causal"
    if seq2seq == (objective == "causal"):
        kind = "an encoder-decoder" if seq2seq else "a decoder alone"
        raise RecipeError(f"objective is {objective} and {recipe.model} is {kind}: leave objective out")
    context = next((config[key] for key in ("max_position_embeddings", "n_positions") if isinstance(config.get(key), int)), None)
    length = recipe.sequence_length or (512 if seq2seq else min(2048, context or 2048))
    if context is not None and length > context and "t5" not in str(config.get("model_type")):
        raise RecipeError(f"sequence_length is {length} and {recipe.model} has positions for {context}: lower it")
    return objective, length


def _source_of(student: Checkpoint) -> Path | None:
    """Where the student's provenance says that it comes from, if that is a folder here."""
    assert student.folder is not None
    try:
        stated = json.loads((student.folder / "gqa_conversion.json").read_bytes())["source"]["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder = Path(str(stated))
    return folder if (folder / "config.json").is_file() else None


@contextmanager
def _stop_requests() -> Iterator[list[str]]:
    """Signals that ask to stop, by name, as they come; a second Ctrl-C stops at once."""
    received: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and "SIGINT" in received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """One run, on this process."""

    def __init__(self, recipe: Recipe, setup: _Setup, on_message: Callable[[str], None], on_step: OnStep, on_tokenize: Any) -> None:
        from gqa_convert.training.checkpoints import Checkpoints
        from gqa_convert.training.distributed import together, wait

        self.recipe, self.setup, self.accelerator = recipe, setup, setup.accelerator
        self.main = bool(self.accelerator.is_main_process)
        self.wait, self.together = partial(wait, self.accelerator), partial(together, self.accelerator)
        self.output = Path(recipe.output)
        self.say = on_message if self.main else lambda _: None
        self.on_step, self.on_tokenize = on_step, on_tokenize
        self.checkpoints = Checkpoints(self.output / "checkpoints", recipe.keep_checkpoints, main=self.main, barrier=self.wait)

    def go(self) -> dict[str, Any]:
        import torch

        from gqa_convert.training.loop import Trainer
        from gqa_convert.training.metrics import Metrics
        from gqa_convert.training.optimizers import build_optimizer

        resumed = self._resumable()
        samples, evaluation = self._data()
        steps = self.recipe.steps(samples.tokens_per_sample)
        self.recipe.warmup(steps)
        torch.manual_seed(self.recipe.seed)
        with self.together():
            inner = self._load_student()
        model = self._distribute(inner)
        optimizer = build_optimizer(inner, self.recipe)
        progress = self._restore(resumed, model, optimizer, samples.fingerprint)
        teacher = self._load_teacher()
        if self.recipe.compile:
            model.compile()
        trainer = Trainer(
            self.recipe, model, optimizer, samples, self.accelerator, steps=steps, teacher=teacher, progress=progress
        )  # fmt: skip
        with self.together():
            self._save_recipe()
        if evaluation and not progress.evaluations:
            self._first_evaluations(trainer, model, teacher, evaluation)
        with self.together():
            metrics = Metrics(self.output / "metrics.jsonl", progress.step) if self.main else None
        self._start_trackers()
        self.say(
            f"{steps:,} steps of {trainer.samples_per_step * samples.tokens_per_sample:,} tokens on {self.accelerator.num_processes} "
            f"process(es), from step {progress.step + 1:,}"
        )
        saved = progress.step
        began, begun_at = time.time(), progress.tokens
        with _stop_requests() as stops:
            for result in trainer.run(lambda: bool(stops)):
                last = result.step == steps
                loss = None
                if evaluation and (last or (self.recipe.evaluate_every and result.step % self.recipe.evaluate_every == 0)):
                    loss = trainer.evaluate(model, evaluation)
                if metrics and (last or loss is not None or result.skipped or result.step % self.recipe.log_every == 0):
                    self._log(metrics, result, loss, steps, trainer.samples_per_step * samples.tokens_per_sample)
                if result.skipped:
                    self.say(f"step {result.step}: the loss or a gradient is not finite; no update")
                if last or result.step % self.recipe.save_every == 0:
                    self._save(model, optimizer, progress, samples.fingerprint)
                    saved = result.step
            if progress.step < steps:
                if saved != progress.step:
                    self._save(model, optimizer, progress, samples.fingerprint)
                name = stops[0] if stops else "a signal to another process"
                raise StoppedError(
                    f"stopped by {name} after step {progress.step} of {steps}, which is saved: run the same command again to go on"
                )
        if metrics:
            metrics.close()
        samples.close()
        seconds = time.time() - began
        return self._finish(inner, model, progress, steps, seconds, progress.tokens - begun_at)

    def _resumable(self) -> tuple[int, dict[str, Any]] | None:
        """The newest checkpoint and its record, once the recipe is seen to fit."""
        with self.together():
            self.checkpoints.sweep()
        with self.together():
            return self._newest()

    def _newest(self) -> tuple[int, dict[str, Any]] | None:
        steps = self.checkpoints.steps()
        if not steps:
            return None
        record = self.checkpoints.read_record(steps[-1])
        different = make_recipe(record["recipe"]).differences(self.recipe)
        if different:
            raise ResumeError(
                f"{self.output} holds a run with another recipe: {'; '.join(different)}; restore these keys to go on, or name another output"
            )
        return steps[-1], record

    def _data(self) -> tuple[Any, list[Any]]:
        from gqa_convert.data.samples import evaluation_blocks, open_samples

        tokenizer = load_tokenizer(self.setup.student_folder)
        start = self.setup.student.config.get("decoder_start_token_id")
        common: dict[str, Any] = {
            "objective": self.setup.objective, "sequence_length": self.setup.sequence_length, "decoder_start": start,
            "is_local_main": self.accelerator.is_local_main_process, "wait": self.wait,
            "progress": self.on_tokenize,
        }  # fmt: skip
        with self.together():
            samples = open_samples(
                list(self.recipe.data), tokenizer, seed=self.recipe.seed, document_mask=self.recipe.document_mask, **common
            )  # fmt: skip
        if self.recipe.evaluation_data is None:
            return samples, []
        with self.together():
            blocks = evaluation_blocks(list(self.recipe.evaluation_data), tokenizer, tokens=self.recipe.evaluation_tokens, **common)
        size = self.recipe.micro_batch_size
        return samples, [blocks.batch(range(at, min(at + size, len(blocks)))) for at in range(0, len(blocks), size)]

    def _load_student(self) -> Any:
        import torch

        from gqa_convert.training.optimizers import choose_trained

        model, missing = load_model(self.setup.student_folder, torch.float32)
        if missing:
            raise CorruptCheckpointError(f"{self.recipe.model} has no fitting tensor for {missing[0]} ({len(missing)} in all)")
        if self.recipe.document_mask:
            from gqa_convert.attention import register

            register()
            model.set_attn_implementation("gqa")
        if self.recipe.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        choose_trained(model, self.recipe.trainable)
        return model.train()

    def _distribute(self, model: Any) -> Any:
        from gqa_convert.training import sharding

        accelerator = self.accelerator
        if sharding.wanted():
            return sharding.shard(model, accelerator.device, accelerator.num_processes, bf16=self.recipe.precision == "bf16")
        if accelerator.num_processes == 1:
            return model.to(accelerator.device)
        return sharding.replicate(model, accelerator.device)

    def _load_teacher(self) -> Any:
        if self.setup.teacher_folder is None:
            return None
        from gqa_convert.training.teacher import load_teacher

        with self.together():
            teacher = load_teacher(self.setup.teacher_folder, self.recipe.teacher_dtype, "cpu")
        return self._place_fixed(teacher)

    def _place_fixed(self, model: Any) -> Any:
        """A model without gradients, whole on every device or, where the student is, split."""
        from gqa_convert.training import sharding

        if sharding.wanted():
            return sharding.shard(model, self.accelerator.device, self.accelerator.num_processes, bf16=False)
        return model.to(self.accelerator.device)

    def _state(self, model: Any, optimizer: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        tensors, moments = get_state_dict(model, optimizer)
        return {"model": tensors, "optimizer": moments}

    def _save(self, model: Any, optimizer: Any, progress: Any, fingerprint: str) -> None:
        state = self._state(model, optimizer)
        self.checkpoints.save(state, progress, self.recipe.resolved(), self.accelerator.num_processes, fingerprint)

    def _restore(self, resumed: tuple[int, dict[str, Any]] | None, model: Any, optimizer: Any, fingerprint: str) -> Any:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        from gqa_convert.training.checkpoints import Progress

        if resumed is None:
            return Progress()
        step, record = resumed
        if record["samples"] != fingerprint:
            raise ResumeError(
                f"the training text or the tokenizer is not what it was when {self.checkpoints.path(step)} was saved: restore it, or name "
                "another output"
            )
        state = self._state(model, optimizer)
        self.checkpoints.load(step, state, self.accelerator.num_processes)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.say(f"going on from {self.checkpoints.path(step)}")
        return Progress(**record["progress"])

    def _save_recipe(self) -> None:
        if self.main:
            import yaml

            (self.output / "recipe.yaml").write_text(yaml.safe_dump(self.recipe.resolved(), sort_keys=False), encoding="utf-8")

    def _first_evaluations(self, trainer: Any, model: Any, teacher: Any, evaluation: list[Any]) -> None:
        """The losses between which the recovery is measured: of the source, and at the start."""
        evaluations = trainer.progress.evaluations
        evaluations["start"] = trainer.evaluate(model, evaluation)
        self.say(f"loss at the start: {evaluations['start']:.4f} nats per token of the evaluation data")
        source = teacher
        if source is None and self.setup.source_folder is not None:
            with self.together():
                source, _ = load_model(self.setup.source_folder, "auto")
            source = self._place_fixed(source.requires_grad_(False))
        if source is not None:
            evaluations["source"] = trainer.evaluate(source, evaluation)
            self.say(f"loss of the source: {evaluations['source']:.4f}")

    def _start_trackers(self) -> None:
        if self.recipe.trackers:
            flat = {
                key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in self.recipe.resolved().items()
            }
            self.accelerator.init_trackers("gqa-convert", config=flat)

    def _log(self, metrics: Any, result: Any, evaluation_loss: float | None, steps: int, tokens_per_step: int) -> None:
        def finite(value: float | None) -> float | None:
            return value if value is not None and abs(value) < float("inf") else None

        line = {
            "step": result.step, "tokens": result.tokens, "loss": finite(result.loss), "lm": finite(result.lm), "kl": finite(result.kl),
            "attention": finite(result.attention), "learning_rate": result.learning_rate, "gradient_norm": finite(result.gradient_norm),
            "tokens_per_second": tokens_per_step / result.seconds, "evaluation_loss": finite(evaluation_loss),
            "skipped": True if result.skipped else None,
        }  # fmt: skip
        metrics.write(**line)
        self.on_step(line | {"steps": steps})
        if self.recipe.trackers:
            numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
            self.accelerator.log(numbers, step=result.step)

    def _finish(self, inner: Any, model: Any, progress: Any, steps: int, seconds: float, tokens: int) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        summary: dict[str, Any] = {}
        with self.together():
            if self.main:
                summary = self._publish(inner, state, progress, steps, seconds, tokens)
        if self.recipe.trackers:
            self.accelerator.end_training()
        return summary

    def _publish(self, inner: Any, state: dict[str, Any], progress: Any, steps: int, seconds: float, tokens: int) -> dict[str, Any]:
        """The trained model, the curve and the summary."""
        from gqa_convert.training.export import export_model
        from gqa_convert.training.metrics import read_metrics

        lines = read_metrics(self.output / "metrics.jsonl")
        final = next((line["evaluation_loss"] for line in reversed(lines) if "evaluation_loss" in line), None)
        summary: dict[str, Any] = {
            "model": str(self.output / "model"), "steps": steps, "tokens": progress.tokens, "skipped_steps": progress.skipped,
            "alpha": self._alpha(progress.tokens), "final_loss": lines[-1].get("loss") if lines else None,
            "evaluation": _recovery(progress.evaluations, final), "processes": self.accelerator.num_processes,
            "seconds_since_resumption": round(seconds, 1), "tokens_per_second": round(tokens / seconds) if seconds else None,
        }  # fmt: skip
        record = {"tokens": progress.tokens, "recipe": self.recipe.resolved(), "evaluation": summary["evaluation"]}
        export_model(inner, state, self.setup.student, self.output / "model", record)
        summary["plot"] = self._plot(lines, progress.evaluations)
        (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary

    def _alpha(self, tokens: int) -> float | None:
        """The paper's uptraining proportion, where the recipe says what the source was pretrained on."""
        return tokens / self.recipe.pretraining_tokens if self.recipe.pretraining_tokens else None

    def _plot(self, lines: list[dict[str, Any]], evaluations: dict[str, float]) -> str | None:
        try:
            from gqa_convert.training.curve import draw_curve
        except ImportError:
            return None
        draw_curve(lines, evaluations, self.output / "loss.png")
        return str(self.output / "loss.png")


def _recovery(evaluations: dict[str, float], final: float | None) -> dict[str, float | None] | None:
    """The share of the loss gap between start and source that is closed."""
    if not evaluations or final is None:
        return None
    start, source = evaluations["start"], evaluations.get("source")
    share = None if source is None or start <= source else (start - final) / (start - source)
    return {"start": start, "source": source, "final": final, "recovered_share": share}
