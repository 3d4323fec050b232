"""Replaces the modelling files of an earlier release in a result by those of this release."""

import time
from pathlib import Path

from gqa_convert._version import __version__
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.errors import OptionError, SourceNotFoundError
from gqa_convert.families.records import record_of
from gqa_convert.families.released import TESTED, TESTED_KEY, is_released, release_of
from gqa_convert.publishing.atomic_files import write_json, write_whole
from gqa_convert.publishing.ownership import WRITTEN, hash_files, is_unchanged
from gqa_convert.runtime.json_objects import JsonObject, parse_object
from gqa_convert.runtime.paths import local_path

CONFIG = "config.json"
REFRESHED = "refreshed"
"""The record's list of the times when modelling files were replaced."""


def refresh_modeling(folder: str | Path) -> list[str]:
    """Replace the modelling files of a result by those of this release, and record that.

    An interruption leaves files of two releases, which the next call finishes.

    Args:
        folder: a result with modelling files of any releases; without modelling files, nothing is
            done.

    Returns:
        The names of the files that were replaced.

    Raises:
        SourceNotFoundError: there is no such result.
        CorruptCheckpointError: its config or its record can't be read.
        OptionError: a modelling file is none that was released, so that it may be somebody's own.
    """
    folder = local_path(folder)
    config, record = _read(folder, CONFIG), _read(folder, PROVENANCE)
    form = record_of(config).modeling
    if form is None or form.model_type != config.get("model_type"):
        return []  # a stock class loads it
    release = release_of(folder, form)
    if release and release.is_current and config.get(TESTED_KEY) == TESTED:
        return []
    for file in form.files:
        if not is_released(folder, file.name):
            raise OptionError(
                f"{folder / file.name} is the modelling file of no release, perhaps your own, "
                "and is left as it is: "
                "convert again for the package's"
            )
    # A file that somebody has changed stays theirs in the record.
    listed = record.get(WRITTEN, {})
    names = [CONFIG, *(file.name for file in form.files)]
    own = [name for name in names if is_unchanged(folder / name, listed.get(name, {}))]
    replaced = [
        file.name for file in form.files if (folder / file.name).read_bytes() != file.read_bytes()
    ]
    for file in form.files:
        write_whole(folder / file.name, file.read_bytes())
    write_json(folder / CONFIG, config | {TESTED_KEY: TESTED})
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    step = {"created": now, "version": __version__, "files": replaced}
    written = {WRITTEN: listed | hash_files(folder, own)}
    write_json(
        folder / PROVENANCE, record | {REFRESHED: [*record.get(REFRESHED, ()), step]} | written
    )
    return replaced


def _read(folder: Path, name: str) -> JsonObject:
    """A JSON file of a result."""
    if not (folder / name).is_file():
        raise SourceNotFoundError(f"{folder} has no {name}: name a folder that gqa-convert made")
    return parse_object((folder / name).read_bytes(), str(folder / name))
