"""One exception class per kind of mistake, and which errors of libraries mean that the memory or
the disk is full.

A message is one line that says what is wrong, what was found and what to do. The command line
prints it and exits with the `exit_code` of the class: 2 for a mistake in the arguments or inputs, 1
for work or a check that failed.
"""

import errno
from pathlib import Path

_LONGEST = 1000
_NO_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In the messages of torch's RuntimeErrors."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_SIGNS = ("No space left", "quota exceeded", "File too large")
"""The same in the messages of libraries that report no errno (safetensors, torch's checkpoints)."""


class GQAConvertError(Exception):
    """The base class of all errors that this package raises deliberately."""

    exit_code = 2
    reported_elsewhere = False
    """Whether another process of the same run prints the same error."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    """The message as one printable line of limited length, since it may quote names from untrusted
    files.
    """
    line = printable(message[:_LONGEST])
    return line if len(message) <= _LONGEST else f"{line} ... {_one_line(message[-200:])}"


def printable(text: str) -> str:
    """The text with every unprintable character escaped: names from files may hold control
    characters.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class SourceNotFoundError(GQAConvertError):
    """The source is neither a folder nor a Hub repository, or it holds no checkpoint."""


class CorruptCheckpointError(GQAConvertError):
    """A file of the checkpoint is missing, truncated or inconsistent."""


class ConfigError(GQAConvertError):
    """`config.json` cannot be read, or the shapes of the tensors contradict it."""


class UnsupportedFamilyError(GQAConvertError):
    """The model type is unknown, or its attention cannot hold fewer K/V heads."""


class UnsupportedFormatError(GQAConvertError):
    """The weights are quantised, an adapter, a training checkpoint, or in a foreign format."""


class NoLanguageModelError(GQAConvertError):
    """The checkpoint lacks the language-model head that the task needs."""


class GroupsError(GQAConvertError):
    """The number of groups does not fit the number of heads."""


class NonFiniteError(GQAConvertError):
    """A tensor that would be merged holds NaN or Inf."""


class OutputError(GQAConvertError):
    """The output exists already, lies in a forbidden place, or cannot be written."""


class NoSpaceError(GQAConvertError):
    """The disk or quota cannot hold the result."""


class OptionError(GQAConvertError):
    """A command-line value is invalid, or conflicts with another one."""


class UnsupportedAttentionError(OptionError):
    """The model would compute something else with this attention function than with eager
    attention.
    """


class RecipeError(GQAConvertError):
    """A recipe cannot be read, or its keys are invalid or conflict. The message has a line for each
    mistake.
    """

    def __init__(self, message: str) -> None:
        Exception.__init__(self, "\n".join(_one_line(line) for line in message.split("\n")))


class DataError(GQAConvertError):
    """Training, calibration or evaluation text is missing, unreadable, empty or too short."""


class ReportError(GQAConvertError):
    """There are no results where they were looked for, or a file of results cannot be read."""


class MissingExtraError(GQAConvertError):
    """An optional package that the command needs is not installed."""


class InterruptedRunError(BaseException):
    """The user or the system asked the program to stop. Like KeyboardInterrupt it is no Exception,
    so that nobody who expects mistakes takes it for one.
    """

    exit_code = 130
    reported_elsewhere = False


class LaunchError(GQAConvertError):
    """The processes of a distributed run do not match its launch, or another job uses the same
    output.
    """


class ResumeError(GQAConvertError):
    """A run cannot resume from its checkpoints."""


class DeviceMemoryError(GQAConvertError):
    """The memory of a GPU or of the machine is too small."""

    exit_code = 1


class DivergedError(GQAConvertError):
    """Training produced non-finite numbers in several consecutive steps."""

    exit_code = 1


class StoppedError(GQAConvertError):
    """A run was asked to stop and saved its state, so that the same command resumes it.

    Exit code 75 is EX_TEMPFAIL of sysexits.h.
    """

    exit_code = 75


class PublishError(GQAConvertError):
    """The checkpoint cannot be published as it is, or the repository cannot receive it."""


class UploadError(GQAConvertError):
    """The Hub was unreachable, refused the upload, or holds other content than what was sent."""

    exit_code = 1


def first_line(problem: BaseException) -> str:
    """The first line of any library's exception, with its class, and the next where the reason
    stands there.
    """
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    shown = 2 if lines and lines[0].endswith(":") else 1
    return f"{type(problem).__name__}: {' '.join(lines[:shown]) or repr(problem)}"[:400]


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an error means that a GPU's or the machine's memory is full."""
    return (
        isinstance(problem, MemoryError)
        or type(problem).__name__ == "OutOfMemoryError"
        or (
            isinstance(problem, RuntimeError)
            and any(sign in str(problem) for sign in _NO_MEMORY_SIGNS)
        )
    )


def is_disk_full(problem: BaseException) -> bool:
    """Whether an error means that a disk, a quota or the largest file size is exhausted."""
    return getattr(problem, "errno", None) in _FULL or any(
        sign in str(problem) for sign in _FULL_SIGNS
    )


def no_space(place: Path, again: str) -> NoSpaceError:
    """The error about a full disk.

    Args:
        place: the file or folder that was written.
        again: what the same command does when it is run again, such as "resumes from the last
            checkpoint".
    """
    return NoSpaceError(
        f"the disk or quota of {place} is full: "
        f"make room and run the same command again, which {again}"
    )
