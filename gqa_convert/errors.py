"""One exception per mistake a user can make.

Code of conduct: a message is one line that says what is wrong, what was found and what to do about it. The command line
prints it and exits with the class's `exit_code`: 2 for a mistake in what was asked or given, 1 for work or a check that
failed.
"""

_LONGEST = 1000


class GQAConvertError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 2
    told_elsewhere = False
    """Another process of the same run has the same error and prints it."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    """The message on one printable line of bearable length: the names it quotes come from files that nobody vouches
    for.
    """
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in message[:_LONGEST]
    )
    return line if len(message) <= _LONGEST else f"{line} ... {_one_line(message[-200:])}"


class SourceNotFoundError(GQAConvertError):
    """No such folder or Hub repository, or it holds no checkpoint."""


class CorruptCheckpointError(GQAConvertError):
    """A file of the checkpoint is missing, truncated or contradicts itself."""


class ConfigError(GQAConvertError):
    """`config.json` cannot be read, or the tensors' shapes contradict it."""


class UnsupportedFamilyError(GQAConvertError):
    """The model type is unknown, or its attention cannot hold fewer K/V heads."""


class UnsupportedFormatError(GQAConvertError):
    """The weights are quantised, an adapter, a training checkpoint or in a foreign format."""


class NoLanguageModelError(GQAConvertError):
    """The checkpoint was saved without the language-model head that the work needs."""


class RemoteHeadersError(UnsupportedFormatError):
    """The weights' format does not let their tensors be listed without downloading them."""


class GroupsError(GQAConvertError):
    """The number of groups does not fit the number of heads."""


class NonFiniteError(GQAConvertError):
    """A tensor that would be merged holds NaN or Inf."""


class OutputError(GQAConvertError):
    """The output folder exists already, or lies where it must not."""


class NoSpaceError(GQAConvertError):
    """The disk cannot hold the result."""


class OptionError(GQAConvertError):
    """A command-line value that makes no sense by itself or beside another."""


class UnsupportedAttentionError(OptionError):
    """A model that would not compute the same under an attention function as under eager attention."""


class RecipeError(GQAConvertError):
    """A recipe that can't be read, or a key of it that makes no sense by itself or beside another."""


class DataError(GQAConvertError):
    """Training or evaluation text that is missing, unreadable, empty or too short."""


class ReportError(GQAConvertError):
    """Folders that hold nothing to report on, or a file of figures that can't be read."""


class MissingExtraError(GQAConvertError):
    """A part of the program needs a package that is not installed."""


class VerificationError(GQAConvertError):
    """A converted checkpoint does not match its source."""

    exit_code = 1


class InterruptedRunError(GQAConvertError):
    """The user or the system asked the program to stop."""

    exit_code = 130


class LaunchError(GQAConvertError):
    """The processes that run are not those that were meant to, or another job uses their output."""


class ResumeError(GQAConvertError):
    """A run can't go on from its checkpoints."""


class DeviceMemoryError(GQAConvertError):
    """The memory of a GPU, or of the machine, does not suffice for a step."""

    exit_code = 1


class DivergedError(GQAConvertError):
    """Training produced numbers that are not finite, several times in a row."""

    exit_code = 1


class StoppedError(GQAConvertError):
    """A run was asked to stop and has saved its state: the same command goes on (75 is EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75


class PublishError(GQAConvertError):
    """A checkpoint that can't be published as it is, or a place on the Hub that can't take it."""


class UploadError(GQAConvertError):
    """The Hub could not be reached, refused, or holds something else than what was sent."""

    exit_code = 1
