"""The methods that are compared, and the conversion of a source by each of them."""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint

from .documents import calibration_file
from .folders import model_folder, scratch


@dataclass(frozen=True)
class Method:
    """A row of the comparison: the options of `convert`, whose default method is None. Without `mix`, nothing is mixed into
    the text of `fit`.
    """

    name: str
    method: str | None
    calibrated: bool = False
    fit_steps: int | None = None
    kl_steps: int | None = None
    mix: bool = False


METHODS = {
    each.name: each
    for each in (
        Method("mean", "mean"),
        Method("first", "first"),
        Method("factor", "factor"),
        Method("default", None),
        Method("factor-calibrated", "factor", calibrated=True),
        Method("fit-closed", "fit", calibrated=True, fit_steps=0, kl_steps=0),
        Method("fit-gradient", "fit", calibrated=True, kl_steps=0),
        Method("fit", "fit", calibrated=True),
        Method("fit-mixed", "fit", calibrated=True, mix=True),
    )
}


class Job(NamedTuple):
    """What tells cells apart; without calibration text there is one seed, None."""

    model: str
    groups: int
    method: str
    calibration: str | None
    calibration_tokens: int | None
    seed: int | None


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint and what it cost, resumed runs included; `tokens` of calibration text, 0 without; `kl`, the
    divergence on held-out calibration text by stage, as `gqa_conversion.json` has it, None without.
    """

    folder: Path
    minutes: float
    core_minutes: float
    tokens: int
    kl: dict[str, Any] | None = None


class Stopwatch:
    """Wall and processor time, kept in a file so that they survive a kill.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"wall": 0.0, "processor": 0.0}
        self._wall, self._processor = before["wall"] - time.monotonic(), before["processor"] - time.process_time()

    @property
    def minutes(self) -> tuple[float, float]:
        """Of wall time and of all cores together."""
        return (self._wall + time.monotonic()) / 60, (self._processor + time.process_time()) / 60

    def save(self) -> None:
        wall, processor = self.minutes
        self._path.write_text(json.dumps({"wall": 60 * wall, "processor": 60 * processor}), encoding="utf-8")


def converted(job: Job, folder: Path) -> Conversion:
    """Convert a source, or take the result of a run that was killed after its conversion.

    Args:
        job: what to convert, and how.
        folder: the benchmark's folder.
    """
    name = "-".join(str(part) for part in job if part is not None)
    out = scratch(folder, "converted", name)
    times = out.with_suffix(".json")
    if not (out.is_dir() and times.is_file()):
        watch = Stopwatch(times)
        method = METHODS[job.method]
        text = _calibration(job, method, folder)
        text = text or CalibrationOptions()
        options = ConversionOptions(method=method.method, calibration=text, overwrite=True)
        convert_checkpoint(model_folder(folder), out, job.groups, options, on_layer=lambda progress: watch.save())
        watch.save()
    stopped = json.loads(times.read_text(encoding="utf-8"))
    calibration = json.loads((out / PROVENANCE).read_text(encoding="utf-8")).get("calibration") or {}
    minutes, core_minutes = (round(stopped[each] / 60, 2) for each in ("wall", "processor"))
    return Conversion(out, minutes, core_minutes, calibration.get("tokens", 0), calibration.get("kl"))


def discard(conversion: Conversion) -> None:
    shutil.rmtree(conversion.folder, ignore_errors=True)
    conversion.folder.with_suffix(".json").unlink(missing_ok=True)


def _calibration(job: Job, method: Method, folder: Path) -> CalibrationOptions | None:
    if job.calibration is None:
        return None
    return CalibrationOptions(
        str(calibration_file(folder, job.calibration)),
        job.calibration_tokens,
        seed=job.seed or 0,
        steps=method.fit_steps,
        kl_steps=method.kl_steps,
        mix=method.mix or method.method != "fit",
    )
