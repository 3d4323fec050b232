"""Paths as users write them, and the folder of the cache."""

import pwd
from pathlib import Path

import pytest

from gqa_convert.errors import OptionError
from gqa_convert.runtime.paths import cache_folder


def test_the_cache_is_in_the_stated_folder_or_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/gqa-convert")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_folder() == Path("/scratch/gqa-convert")


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a number for a user."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match="no home folder for the cache: set XDG_CACHE_HOME"):
        cache_folder()
