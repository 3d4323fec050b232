"""What merging the decoder of a model that hears loses: Whisper base, whose 8 K/V heads become 4, 2 and 1.

    python -m benchmarks.real.whisper --folder FOLDER [--groups 2 1] [--methods mean layers fit] [--seeds 0 1]

FOLDER gets the checkpoint, the spoken sentences and the results; what it holds is not made again, and a killed command
resumes when it is repeated. Each seed of calibration has sentences of its own. The encoder is never changed, so that its
outputs are computed once for all models. The table goes into docs/results/README.md.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.pages import filled, table
from benchmarks.records import Cell, Records
from gqa_convert.conversion.fit.model_loading import open_model
from gqa_convert.conversion.fit.progress import ALL_TOGETHER, FitProgress
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data.audio_files import AudioFile, list_audio_files
from gqa_convert.data.speech import SpeechModel, SpeechSize, cut_windows, speech_batches, speech_tokens_for
from gqa_convert.measuring.evaluation.comparison import Mean, mean
from gqa_convert.measuring.evaluation.forward import token_scores
from gqa_convert.measuring.evaluation.word_errors import word_errors

from .folders import DEFAULT_FOLDER
from .spoken import speak
from .whisper_source import make_source

OUTPUT, PAGE = Path("docs/results/whisper.json"), Path("docs/results/README.md")
METHODS = {
    "mean": "`--method mean`",
    "layers": "`fit` without its last stage (`--kl-steps 0`)",
    "fit": "`fit`, the default",
}
CALIBRATION_SENTENCES = 500
_AT_ONCE = 16
"""Windows of a batch."""
_PER_SENTENCE = ("losses", "kl", "tokens", "errors", "words")


class HeldOut:
    """The held-out sentences, and what the encoder makes of them.

    Args:
        folder: the benchmark's.
        count: sentences.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.source = SpeechModel(open_model(folder / "source"), folder / "source")
        self.files: list[AudioFile] = list_audio_files(folder / "held-out")[:count]
        path = folder / f"encoded-{count}.pt"
        if not path.is_file():
            parts = []
            for first in range(0, count, _AT_ONCE):
                windows = list(cut_windows(self.files[first : first + _AT_ONCE], self.source))
                parts.append(self.source.encode(windows))
                sys.stderr.write(f"heard {first + len(windows)} of {count} sentences\n")
            torch.save(torch.cat(parts), path)
        self._encoded: Tensor = torch.load(path, mmap=True)

    def score(self, model: SpeechModel) -> Cell:
        """What a model makes of each sentence: sums over its tokens, and its word errors."""
        cell: Cell = {name: [] for name in _PER_SENTENCE}
        heard = []
        for first in range(0, len(self.files), _AT_ONCE):
            encoded = self._encoded[first : first + _AT_ONCE]
            prompts = model.prompts(encoded)
            for row, file in enumerate(self.files[first : first + _AT_ONCE]):
                targets = torch.tensor(model.text_tokens(file.text or ""))
                tokens = torch.cat([prompts[row], targets[:-1]])
                logits, wanted = (_logits(each, encoded[row], tokens)[-len(targets) :] for each in (model, self.source))
                losses, divergences, *_ = token_scores(logits, targets, wanted)
                cell["losses"].append(round(float(losses.sum()), 4))
                cell["kl"].append(round(float(divergences.sum()), 4))
                cell["tokens"].append(len(targets))
            heard += model.transcribe(encoded)
            sys.stderr.write(f"scored {len(heard)} of {len(self.files)} sentences\n")
        errors, words = word_errors([file.text or "" for file in self.files], heard)
        return cell | {"errors": errors.tolist(), "words": words.tolist()}


def _logits(model: SpeechModel, encoded: Tensor, tokens: Tensor) -> Tensor:
    """[L, vocabulary] of one sentence."""
    with torch.no_grad():
        logits: Tensor = model.model(encoder_outputs=encoded[None], decoder_input_ids=tokens[None]).logits[0]
    return logits


def make_folder(folder: Path, sentences: int, seeds: list[int]) -> None:
    """The checkpoint, the held-out sentences, and those of each seed of calibration."""
    if not (folder / "source").is_dir():
        make_source(folder / "source")
    if not (folder / "held-out").is_dir():
        speak(folder / "held-out", sentences, held_out=True, seed=0)
    for seed in seeds:
        if not (folder / f"calibration-{seed}").is_dir():
            speak(folder / f"calibration-{seed}", CALIBRATION_SENTENCES, held_out=False, seed=seed)


def heard(folder: Path, seed: int) -> tuple[CalibrationOptions, float]:
    """What `convert` draws by default from the sound of a seed, as ready batches, which all numbers of heads share; and the
    processor minutes that it took to hear them.

    Args:
        folder: the benchmark's.
        seed: of calibration.
    """
    path = folder / f"heard-{seed}.pt"
    if not path.is_file():
        began = time.process_time()
        source = SpeechModel(open_model(folder / "source"), folder / "source")
        tokens = speech_tokens_for(source.model.config.to_dict())
        size = SpeechSize(tokens, tokens // 8, tokens)
        files = list_audio_files(folder / f"calibration-{seed}")
        found = speech_batches(source, files, size, seed=seed, progress=_count)
        minutes = (time.process_time() - began) / 60
        torch.save([found.tokens, [*found.layers, *found.held_out, *found.fresh], minutes], path)
        sys.stderr.write(f"heard {found.description}, in {minutes:.1f} core minutes\n")
    tokens, batches, minutes = torch.load(path, mmap=True)
    return CalibrationOptions(batches=batches, tokens=tokens, seed=seed), minutes


def converted(folder: Path, method: str, groups: int, seed: int) -> tuple[Path, float]:
    """A result, and the processor minutes that it took, with those of hearing the sound. `layers` has the layers of `fit`,
    which are fitted once.
    """
    out = folder / "converted" / f"{method}-{groups}-{seed}"
    out.parent.mkdir(exist_ok=True)
    minutes = out.with_suffix(".json")
    options = ConversionOptions(method="mean")
    hearing = 0.0
    if method != "mean" and not out.is_dir():
        calibration, hearing = heard(folder, seed)
        options = ConversionOptions(calibration=replace(calibration, kl_steps=0 if method == "layers" else None))
    began = time.process_time()

    def passed(path: Path) -> None:
        path.write_text(str(round((time.process_time() - began) / 60 + hearing, 1)))

    def on_layer(progress: FitProgress) -> None:
        sys.stderr.write(f"{out.name}: {progress.label} {progress.done} of {progress.total} {progress.detail}\n")
        layers = out.with_name(f"layers-{groups}-{seed}")
        before, after = (each.with_name(f".{each.name}.gqa-merging") for each in (out, layers))
        if (method, progress.label, progress.done) == ("fit", ALL_TOGETHER, 0) and not after.exists():
            shutil.copytree(before, after)
            passed(layers.with_suffix(".json"))

    if not out.is_dir():
        convert_checkpoint(folder / "source", out, groups, options, on_layer=on_layer)
    if not minutes.is_file():
        passed(minutes)
    return out, float(minutes.read_text())


def _count(done: int, total: int) -> None:
    sys.stderr.write(f"heard {done} of {total} tokens\n")


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Method, groups and seed of each cell; mean pooling has one seed."""
    for seed in options.seeds:
        for groups in options.groups:
            yield from ((method, groups, seed) for method in options.methods if method != "mean" or not seed)


def share(cell: Cell, over: str, of: str) -> Mean:
    """A ratio of sums over sentences."""
    return mean(np.array(cell[over], np.float64), np.array(cell[of], np.float64))


def report(data: dict[str, Any]) -> str:
    """The table: means over seeds, standard errors over sentences."""
    source = data["models"]["whisper-base"]["scores"]
    words = share(source, "errors", "words")
    loss = share(source, "losses", "tokens")
    rows = [
        [
            "8",
            "source",
            "",
            "",
            f"{loss.value:.2f}",
            "",
            f"{100 * (words.value or 0):.1f}% ± {100 * (words.error or 0):.1f}",
            "",
        ]
    ]
    found: dict[tuple[int, str], list[Cell]] = {}
    for cell in data["cells"]:
        found.setdefault((cell["groups"], cell["method"]), []).append(cell)
    for groups, method in sorted(found, key=lambda key: (-key[0], list(METHODS).index(key[1]))):
        cells = found[groups, method]
        row = [str(groups), METHODS[method], str(len(cells)) if method != "mean" else ""]
        row.append(f"{statistics.mean(cell['minutes'] for cell in cells):.0f}")
        row.append(_over_seeds([share(cell, "losses", "tokens").value or 0.0 for cell in cells], "{:.2f}"))
        row.append(_over_seeds([share(cell, "kl", "tokens").value or 0.0 for cell in cells], "{:.3f}"))
        errors = [share(cell, "errors", "words") for cell in cells]
        more = [each.minus(words) for each in errors]
        row.append(_over_seeds([100 * (each.value or 0.0) for each in errors], "{:.1f}%"))
        added = _over_seeds([100 * (each.value or 0.0) for each in more], "{:+.1f}")
        rows.append([*row, f"{added} ± {100 * statistics.mean(each.error or 0.0 for each in more):.1f}"])
    header = ["K/V heads", "method", "seeds", "core minutes", "loss", "KL", "word errors", "more than the source"]
    return table(header, rows)


def _over_seeds(values: list[float], form: str) -> str:
    """The mean, and the range of several."""
    shown = form.format(statistics.mean(values))
    ends = [form.format(each) for each in (min(values), max(values))]
    return shown if len(values) == 1 else f"{shown} ({' to '.join(ends)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER.parent / "whisper")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=[*reversed(METHODS)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sentences", type=int, default=200, help="held out (default: 200)")
    options = parser.parse_args()
    folder = options.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    make_folder(folder, options.sentences, options.seeds)
    records = Records(options.output, ("method", "groups", "seed"))
    held_out = HeldOut(folder, options.sentences)
    source = records.model("whisper-base", folder / "source")
    if "scores" not in source:
        source["scores"] = held_out.score(held_out.source)
    records.begin("benchmarks.real.whisper", sum(source["scores"]["tokens"]))
    records.write()
    for method, groups, seed in jobs(options):
        if records.find(method=method, groups=groups, seed=seed) is None:
            out, minutes = converted(folder, method, groups, seed)
            scores = held_out.score(SpeechModel(open_model(out), out))
            cell = {"model": "whisper-base", "method": method, "groups": groups, "seed": seed, "minutes": minutes}
            records.add(cell | scores)
            sys.stderr.write(report(records.data) + "\n")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), "whisper", report(records.data)), encoding="utf-8")


if __name__ == "__main__":
    main()
