"""Finds clients in an interpreter that the user names, in a folder that `--install` created, or in this program's
environment.
"""

import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gqa_convert.checkpoint.paths import cache_folder, local_path
from gqa_convert.errors import MissingExtraError

from .client import Client
from .process import run

_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Place:
    """An interpreter in which a client is installed.

    Attributes:
        python: its path.
        version: the version of the client.
        folder: the folder at the start of its module path; None if not needed.
    """

    python: str
    version: str
    folder: Path | None = None

    def environment(self) -> dict[str, str]:
        """The environment of a process that runs it: offline, and without this program's module path."""
        environment = {
            key: value for key, value in os.environ.items() if key != "PYTHONPATH" or self.python == sys.executable
        }
        if self.folder is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.folder), environment.get("PYTHONPATH"))))
        return environment | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}


def client_folder(client: Client) -> Path:
    """The folder into which `--install` puts a client."""
    name = f"{client.name}-python{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder().absolute() / "clients" / name


def find_place(client: Client, python: str | None = None) -> Place | None:
    """The interpreter to use, None if the client is not installed.

    Args:
        client: the client to look for.
        python: an interpreter that the user named; then no other is considered.
    """
    if python is not None:
        path = shutil.which(python) or shutil.which(local_path(python))
        # symbolic links are not resolved, because they lead out of a virtual environment
        candidates = [Place(str(Path(path).absolute()), "")] if path else []
    else:
        folder = client_folder(client)
        candidates = [Place(sys.executable, "", folder)] if folder.is_dir() else []
        candidates.append(Place(sys.executable, ""))
    for place in candidates:
        version = _version(client, place)
        if version is not None:
            return Place(place.python, version, place.folder)
    return None


def _version(client: Client, place: Place) -> str | None:
    for distribution in client.distributions:
        code = f"from importlib.metadata import version; print(version({distribution!r}))"
        try:
            ended = run([place.python, "-c", code], place.environment(), seconds=_PROBE_SECONDS)
        except OSError:
            return None
        if ended.code == 0 and ended.output:
            return ended.output[-1].strip()
    return None


def install_command(client: Client) -> list[str]:
    """The command that creates the client's folder. Its packages come first on the module path; torch and the rest are
    shared with this program.
    """
    return _pip(client, client_folder(client))


def _pip(client: Client, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    return [*command, *client.requirements]


def install(client: Client) -> None:
    """Make or replace the client's folder in one step.

    Raises:
        MissingExtraError: pip failed, or the client can't be installed this way.
    """
    if not client.requirements:
        raise MissingExtraError(f"{client.name} can't be installed beside this program: it needs {client.needs}")
    folder = client_folder(client)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        _run_pip(client, _pip(client, staged))
        if client.sources:
            _add_sources(client, staged)
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _run_pip(client: Client, command: list[str]) -> None:
    ended = run(command)
    if ended.code:
        reason = next((line for line in reversed(ended.errors) if line.startswith("ERROR")), str(ended))
        raise MissingExtraError(
            f"{client.name} was not installed, pip says: {reason}; try {shlex.join(install_command(client))}"
        )


def _add_sources(client: Client, folder: Path) -> None:
    """Add the files of the package's source archive that its wheel lacks."""
    name = client.distributions[0]
    exactly = f"{name}=={_version(client, Place(sys.executable, '', folder))}"
    with tempfile.TemporaryDirectory(prefix="gqa-convert-sources-") as made:
        options = ["--quiet", "--no-deps", "--no-binary", name, "--dest", made]
        _run_pip(client, [sys.executable, "-m", "pip", "download", *options, exactly])
        (archive,) = Path(made).glob("*.tar.gz")
        with tarfile.open(archive) as members:
            for member in members:
                inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                content = members.extractfile(member)  # None for folders
                if content is not None and any(inside.is_relative_to(source) for source in client.sources):
                    (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                    (folder / inside).write_bytes(content.read())
