"""Where clients are found: in an interpreter that the user names, in a folder of their own that `--install` made, or beside this program."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.errors import MissingExtraError

from .client import Client


@dataclass(frozen=True)
class Place:
    """An interpreter that has a client.

    Attributes:
        python: its path.
        version: of the client.
        folder: put first on its module path; None where it needs none.
    """

    python: str
    version: str
    folder: Path | None = None

    def environment(self) -> dict[str, str]:
        """Of a process that runs it: nothing is fetched, and nothing leaks in from this program's module path."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or self.python == sys.executable}
        if self.folder is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.folder), environment.get("PYTHONPATH"))))
        return environment | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}


def client_folder(client: Client) -> Path:
    """Where `--install` puts it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gqa-convert" / "clients" / f"{client.name}-python{sys.version_info.major}.{sys.version_info.minor}"


def find_place(client: Client, python: str | None = None) -> Place | None:
    """The interpreter to use, None if the client is nowhere.

    Args:
        client: what is looked for.
        python: an interpreter that the user named; then no other counts.
    """
    if python is not None:
        candidates = [Place(python, "")]
    else:
        folder = client_folder(client)
        candidates = [Place(sys.executable, "", folder)] if folder.is_dir() else []
        candidates.append(Place(sys.executable, ""))
    for place in candidates:
        version = _version(client, place)
        if version is not None and version.startswith(client.version):
            return Place(place.python, version, place.folder)
    return None


def _version(client: Client, place: Place) -> str | None:
    names = [client.distribution, *client.beside]
    code = f"from importlib.metadata import version; print(*map(version, {names}))"
    try:
        done = subprocess.run([place.python, "-c", code], env=place.environment(), capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.split()[0] if done.returncode == 0 else None


def install_command(client: Client) -> list[str]:
    """What makes the client's folder: its packages go first on the module path, torch and the rest are shared with this program."""
    return _pip(client, client_folder(client))


def _pip(client: Client, folder: Path) -> list[str]:
    options = [] if client.dependencies else ["--no-deps"]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *options, *client.requirements]


def install(client: Client) -> None:
    """Make the client's folder, whole or not at all.

    Raises:
        MissingExtraError: pip failed.
    """
    folder = client_folder(client)
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        done = subprocess.run(_pip(client, staged), capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            reason = errors[-1] if errors else f"exit code {done.returncode}"
            raise MissingExtraError(f"{client.name} was not installed, pip says: {reason}; try {shlex.join(install_command(client))}")
        if not folder.is_dir():
            staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
