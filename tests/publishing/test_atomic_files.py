"""Files that appear whole or not at all, locks between processes, and what the system's errors
mean.
"""

import errno
import json
import os
from pathlib import Path

import pytest

from gqa_convert.errors import is_disk_full
from gqa_convert.publishing.atomic_files import atomic_file, write_json, write_whole
from gqa_convert.publishing.locks import try_lock, wait_for_lock


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert sorted(each.name for each in tmp_path.iterdir()) == [".file.new", "file"]
    assert path.read_bytes() == b"new"
    write_json(path, {"ä": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ä": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_alone(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = try_lock(path)
    assert held is not None
    assert try_lock(path) is None
    os.close(held)
    with wait_for_lock(path):
        assert try_lock(path) is None
    again = try_lock(path)
    assert again is not None
    os.close(again)


def test_which_errors_mean_a_full_disk() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert is_disk_full(OSError(number, os.strerror(number)))
    assert is_disk_full(
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert not is_disk_full(PermissionError(errno.EACCES, "Permission denied"))
