"""No file that this program did not write is deleted or overwritten."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from gqa_convert.errors import OutputError
from gqa_convert.publishing.ownership import foreign_files, signed
from tests.helpers.checkpoints import by_mean, digests, write_llama


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_llama(tmp_path / "source", shards=3)
    (folder / "assets").mkdir()
    (folder / "assets" / "chat.txt").write_text("carried")
    (folder / "pytorch_model.bin").write_bytes(b"left behind")
    return folder


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    by_mean(source, tmp_path / "out", 4)
    return tmp_path / "out"


def refused(source: Path, out: Path, *words: str, overwrite: bool = True) -> None:
    """Converting to OUT fails with one line that holds the words, and changes nothing."""
    before = digests(out, ignore=())
    with pytest.raises(OutputError) as caught:
        by_mean(source, out, 3, overwrite=overwrite)
    assert digests(out, ignore=()) == before
    for word in words:
        assert word in str(caught.value)


def replaced(source: Path, out: Path) -> None:
    by_mean(source, out, 3, overwrite=True)
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 3


def rewrite(path: Path, content: bytes) -> None:
    """Later than the record, also where the clock is coarse."""
    path.write_bytes(content)
    os.utime(path, ns=(time.time_ns() + 10**9,) * 2)


def test_the_record_lists_every_file_beside_it(out: Path) -> None:
    listed = json.loads((out / "gqa_conversion.json").read_text())["written"]
    assert listed.keys() == digests(out).keys()
    for name, digest in digests(out).items():
        assert listed[name]["bytes"] == (out / name).stat().st_size
        if name.endswith(".safetensors"):
            assert listed[name]["changed_ns"] == (out / name).stat().st_ctime_ns
        else:
            assert listed[name]["sha256"] == digest
    assert foreign_files(out) == []


def test_other_files_in_a_result(source: Path, out: Path) -> None:
    (out / "thesis.tex").write_text("years of work")
    (out / "data").mkdir()
    (out / "data" / "rows.csv").write_text("1,2")
    (out / "assets" / "mine.txt").write_text("x")
    refused(source, out, "thesis.tex", "data/rows.csv", "assets/mine.txt")
    refused(source, out, "exists already: name a new folder", overwrite=False)
    (out / "thesis.tex").unlink()
    shutil.rmtree(out / "data")
    (out / "assets" / "mine.txt").unlink()
    (out / "pytorch_model.bin").write_bytes(
        b"trained elsewhere"
    )  # the source has such a file, and no conversion copies it
    refused(source, out, "pytorch_model.bin")
    (out / "pytorch_model.bin").unlink()
    for target in ("config.json", "assets"):
        (out / "link").symlink_to(target)
        refused(source, out, "link")
        (out / "link").unlink()
    (out / "README.md").symlink_to("nowhere")
    refused(source, out, "README.md")
    (out / "README.md").unlink()
    replaced(source, out)


WEIGHTS = "model-00002-of-00003.safetensors"


def old(path: Path) -> None:
    """Make a file older than every result, as `cp -p` does."""
    os.utime(path, ns=(10**18, 10**18))


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "assets/chat.txt"])
def test_a_file_of_the_same_size_that_is_older(
    source: Path, tmp_path: Path, name: str, hashed: bool
) -> None:
    """Trained weights, or an edited tokenizer, that `cp -p` or `mv` put in the place of ours."""
    for put in (shutil.copy2, os.rename):
        out = tmp_path / f"out-{put.__name__}"
        by_mean(source, out, 4, hash_weights=hashed)
        mine = tmp_path / "mine"
        mine.write_bytes(b"x" * (out / name).stat().st_size)
        old(mine)
        put(mine, out / name)
        refused(source, out, name)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_file_that_was_written_to_in_place(source: Path, tmp_path: Path, hashed: bool) -> None:
    """Its size and, after `touch -d`, its time are ours."""
    out = tmp_path / "out"
    by_mean(source, out, 4, hash_weights=hashed)
    before = (out / WEIGHTS).stat()
    with (out / WEIGHTS).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"mine")
    os.utime(out / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused(source, out, WEIGHTS)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_copy_of_a_result_is_ours_where_its_weights_have_hashes(
    source: Path, tmp_path: Path, hashed: bool
) -> None:
    by_mean(source, tmp_path / "out", 4, hash_weights=hashed)
    copy = shutil.copytree(tmp_path / "out", tmp_path / "copy")
    if hashed:
        replaced(source, copy)
    else:
        refused(source, copy, WEIGHTS, "copied there")


def test_a_card_of_publish_may_be_replaced_and_an_edited_one_not(source: Path, out: Path) -> None:
    card = signed("---\nlicense: mit\n---\n", "{}", "# A card\n")
    rewrite(out / "README.md", (card + "my own words\n").encode())
    refused(source, out, "README.md")
    rewrite(out / "README.md", card.encode())
    replaced(source, out)
