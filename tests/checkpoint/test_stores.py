"""Checkpoints in object stores: what travels, what is kept, and that a store never holds half a result.

S3 is a server of its own (moto's), reached through s3fs; other cases use fsspec's store in memory.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gqa_convert.checkpoint.paths import cache_folder
from gqa_convert.checkpoint.publication import check_destination
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.checkpoint.store_results import scratch_folder
from gqa_convert.checkpoint.stores import StoreFiles, store_address
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.restating.restate import restate_checkpoint
from gqa_convert.conversion.run import ConversionResult, convert_checkpoint
from gqa_convert.errors import (
    CorruptCheckpointError,
    GQAConvertError,
    InterruptedRunError,
    MissingExtraError,
    OptionError,
    OutputError,
    SourceNotFoundError,
    StoreError,
    UnsupportedFormatError,
    UploadError,
)
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import digests, llama_arrays, write_llama
from tests.helpers.s3_server import S3Server, etags, objects, put_folder

RECORD, CONFIG, INDEX = "gqa_conversion.json", "config.json", "model.safetensors.index.json"
MARKER = ".gqa-convert-upload.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three files, of which headers are a small part, and a file that is not needed."""
    made = write_llama(
        tmp_path_factory.mktemp("stores") / "source",
        arrays=llama_arrays(hidden=480),
        shards=3,
        config={"hidden_size": 480},
    )
    (made / "pytorch_model.bin").write_bytes(b"0" * 1000)
    (made / "sub").mkdir()
    (made / "sub" / "note.txt").write_text("carried")
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The files of a local conversion."""
    convert_checkpoint(folder, folder.parent / "expected", 4, method="mean")
    return digests(folder.parent / "expected")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", running.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield running
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def s3(server: S3Server, folder: Path) -> Iterator[S3Server]:
    """The server with the checkpoint at `s3://models/source` and nothing else."""
    files = fsspec.filesystem("s3", use_listings_cache=False)
    server.before = lambda method, key: None
    if not files.exists("models"):
        files.mkdir("models")
    if etags(files) != server.etags or not server.etags:
        for path in files.find("models"):
            files.rm_file(path)
        put_folder(files, folder, "models/source")
        server.etags = etags(files)
    server.log.clear()
    yield server
    server.before = lambda method, key: None


@pytest.fixture
def memory(folder: Path) -> Any:
    """fsspec's store in memory, with the checkpoint at `memory://models/source` and nothing else."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    put_folder(files, folder, "/models/source")
    return files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of each test is its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def convert(source: str | Path, out: str | Path, groups: int = 4, **options: Any) -> ConversionResult:
    return convert_checkpoint(source, out, groups, method="mean", **options)


def in_store(files: Any, prefix: str, *, ignore: tuple[str, ...] = (RECORD,)) -> dict[str, str]:
    """The SHA-256 of every object under a prefix."""
    held = objects(files, prefix)
    return {name: hashlib.sha256(held[name]).hexdigest() for name in sorted(held) if name not in ignore}


class TestSource:
    def test_a_plan_reads_headers_alone(self, s3: S3Server, folder: Path, cache: Path) -> None:
        together = threading.Barrier(3, timeout=30)  # headers of three files, read one after another, never arrive

        def before(method: str, key: str) -> None:
            if method == "GET" and key.endswith(".safetensors"):
                together.wait()

        s3.before = before
        checkpoint = open_checkpoint("s3://models/source", stores=True)
        local = make_plan(open_checkpoint(folder), 4).summary()
        assert make_plan(checkpoint, 4).summary() == local | {"source": "s3://models/source"}
        shards = sorted(folder.glob("model-*"))
        for path in shards:
            assert s3.sent(f"models/source/{path.name}") == 8 + int.from_bytes(path.read_bytes()[:8], "little")
        read = {request.key.removeprefix("models/source/") for request in s3.log if request.nbytes}
        assert read == {path.name for path in shards} | {CONFIG, INDEX, "models"}
        sent = sum(request.nbytes for request in s3.log)
        assert sent < 30_000 < checkpoint.weight_bytes // 10
        assert not cache.exists()

    def test_a_conversion_has_the_bytes_of_a_local_one(
        self, s3: S3Server, folder: Path, expected: dict[str, str], tmp_path: Path
    ) -> None:
        moved: list[tuple[str, int, int]] = []
        result = convert("s3://models/source/", tmp_path / "out", on_transfer=lambda *each: moved.append(each))
        assert digests(tmp_path / "out") == expected
        assert s3.sent("models/source/pytorch_model.bin") == 0
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".bin")
        assert moved[-1] == ("fetching", total, total)
        source = json.loads((tmp_path / "out" / RECORD).read_bytes())["source"]
        assert (source["id"], source["revision"]) == ("s3://models/source", None)
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".bin":  # of an object that is uploaded at once, the ETag is its MD5
                etag = hashlib.md5(path.read_bytes()).hexdigest()
                assert source["files"][path.relative_to(folder).as_posix()]["etag"] == etag
        s3.log.clear()
        convert("s3://models/source", tmp_path / "again", 2)
        assert sum(s3.sent(f"models/source/{path.name}") for path in folder.iterdir()) < 30_000  # headers and JSON
        assert result.plan.checkpoint.source_id == "s3://models/source"

    def test_a_fetch_that_was_killed_continues(self, s3: S3Server, expected: dict[str, str], tmp_path: Path) -> None:
        refused = "models/source/model-00003-of-00003.safetensors"

        def before(method: str, key: str) -> None:
            if method == "GET" and key == refused:
                raise PermissionError

        files = StoreFiles("s3://models/source")
        s3.before = before
        with pytest.raises(StoreError, match="refuses access"):
            files.fetch(["pytorch_model.bin"], lambda done, total: None)
        (kept,) = (cache_folder() / "stores").glob("*/objects")
        while list(kept.glob("*.part")):  # the files that were on their way
            time.sleep(0.01)
        whole = {path.name for path in kept.iterdir()}
        assert not (kept.parent / "checkpoints").exists()
        (kept / "0.0.part").write_bytes(b"half")  # what a killed process leaves
        s3.before = lambda method, key: None
        s3.log.clear()
        convert("s3://models/source", tmp_path / "out")
        assert digests(tmp_path / "out") == expected
        fetched = [request.key for request in s3.log if request.method == "GET" and not request.range]
        assert len([key for key in fetched if key.startswith("models/source/")]) == 7 - len(whole)
        assert not list(kept.glob("*.part"))

    def test_a_changed_object_is_fetched_again(self, memory: Any) -> None:
        first = open_checkpoint("memory://models/source", stores=True, download=True)
        memory.pipe_file("/models/source/sub/note.txt", b"changed")  # as long as before
        moved: list[int] = []
        second = open_checkpoint(
            "memory://models/source", stores=True, download=True, on_fetched=lambda done, total: moved.append(total)
        )
        assert set(moved) == {len("changed")}
        assert first.folder is not None
        assert second.folder is not None
        assert (first.folder / "sub" / "note.txt").read_text() == "carried"  # what another process may be reading
        assert (second.folder / "sub" / "note.txt").read_text() == "changed"
        assert first.versions != second.versions

    @pytest.mark.parametrize("download", [True, False])
    def test_a_source_that_changes_between_files(self, s3: S3Server, download: bool) -> None:
        files, once = fsspec.filesystem("s3"), threading.Semaphore(1)

        def before(method: str, key: str) -> None:
            if method == "GET" and key.endswith(".safetensors") and once.acquire(blocking=False):
                files.pipe_file("models/source/tokenizer.json", b"{}")

        s3.before = before
        with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json has changed while the checkpoint was read"):
            open_checkpoint("s3://models/source", stores=True, download=download)

    def test_names_that_lead_out_of_the_folder(self, memory: Any, tmp_path: Path, expected: dict[str, str]) -> None:
        for name in ("../escaped.txt", "sub/../../escaped.txt", ".hidden", "a//b", "__pycache__/x.pyc"):
            memory.store[f"/models/source/{name}"] = memory.store["/models/source/sub/note.txt"]
        convert("memory://models/source", tmp_path / "out")
        assert digests(tmp_path / "out") == expected
        assert not list(tmp_path.rglob("escaped.txt"))

    def test_bin_files_are_fetched_first(self, memory: Any, tmp_path: Path) -> None:
        import torch

        for name in memory.find("/models/source"):
            if "safetensors" in name:
                memory.rm_file(name)
        tensors = {name: torch.from_numpy(array) for name, array in llama_arrays(hidden=480).items()}
        torch.save(tensors, tmp_path / "weights")
        memory.pipe_file("/models/source/pytorch_model.bin", (tmp_path / "weights").read_bytes())
        assert convert("memory://models/source", tmp_path / "out").out_bytes

    def test_a_gguf_file_is_refused(self, memory: Any, tmp_path: Path) -> None:
        memory.store.clear()
        memory.pipe_file("/models/source/model-Q4_K_M.gguf", b"GGUF")
        with pytest.raises(UnsupportedFormatError, match="GGUF files are read from folders and the Hub"):
            convert("memory://models/source", tmp_path / "out")


class TestResult:
    def test_it_has_the_bytes_of_a_local_one(
        self, s3: S3Server, folder: Path, expected: dict[str, str], cache: Path
    ) -> None:
        moved: list[tuple[str, int, int]] = []
        notes: list[str] = []
        result = convert(folder, "s3://models/out", on_transfer=lambda *each: moved.append(each), on_note=notes.append)
        files = fsspec.filesystem("s3")
        assert in_store(files, "models/out") == expected
        assert result.out == result.as_json()["out"] == "s3://models/out"
        assert result.out_bytes == sum(len(content) for content in objects(files, "models/out").values())
        written = [key.removeprefix("models/out/") for key in s3.received()]
        assert written[0] == MARKER
        assert written[-3:] == [INDEX, CONFIG, RECORD]
        assert sorted(written[1:]) == sorted([*expected, RECORD])
        assert {direction for direction, _, _ in moved} == {"uploading"}
        assert moved[-1][1] == moved[-1][2]
        assert notes == [f"the result is written to {scratch_folder('s3://models/out')} and then uploaded"]
        assert not list((cache / "results").iterdir())
        report = verify_checkpoint("s3://models/out", "s3://models/source", logits=False)
        assert report.passed, report.summary()
        assert report.out == "s3://models/out"

    def test_an_upload_that_was_interrupted_continues(
        self, s3: S3Server, folder: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(_: str, done: int, total: int) -> None:
            if done > total // 2:
                raise InterruptedRunError("stopped")

        files = fsspec.filesystem("s3")
        with pytest.raises(InterruptedRunError):
            convert(folder, "s3://models/out", on_transfer=stop)
        held = set(objects(files, "models/out"))
        assert MARKER in held
        assert not held & {CONFIG, INDEX, RECORD}
        with monkeypatch.context() as other:  # a run without this one's scratch folder
            other.setenv("XDG_CACHE_HOME", str(folder.parent / "other"))
            with pytest.raises(OutputError, match="unfinished upload of another run"):
                convert(folder, "s3://models/out")
        monkeypatch.setattr("gqa_convert.conversion.run.write_weights", None)  # nothing is converted again
        s3.log.clear()
        notes: list[str] = []
        result = convert(folder, "s3://models/out", on_note=notes.append)
        assert in_store(files, "models/out") == expected
        assert set(s3.received()) < {f"models/out/{name}" for name in (*expected, RECORD, MARKER)}
        assert "nothing is converted again" in notes[0]
        assert result.merge_error == json.loads(objects(files, "models/out")[RECORD])["merge_error"]

    def test_an_interrupted_upload_gives_way_to_another_conversion(self, memory: Any, folder: Path) -> None:
        """Of the same address by the same user, who has decided otherwise."""

        def stop(*_: Any) -> None:
            raise InterruptedRunError("stopped")

        with pytest.raises(InterruptedRunError):
            convert(folder, "memory://models/out", on_transfer=stop)
        convert(folder, "memory://models/out", 2, max_shard_size=200_000)
        convert(folder, folder.parent / "two", 2, max_shard_size=200_000, overwrite=True)
        assert in_store(memory, "/models/out") == digests(folder.parent / "two")

    def test_a_result_that_took_the_place_of_another_is_not_taken_for_it(
        self, memory: Any, folder: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The upload of one conversion was interrupted, and another died before its own upload began."""

        def stop(*_: Any) -> None:
            raise InterruptedRunError("stopped")

        with pytest.raises(InterruptedRunError):
            convert(folder, "memory://models/out", on_transfer=stop)
        with monkeypatch.context() as patch:
            patch.setattr("gqa_convert.conversion.run.StoreResult.upload", stop)
            with pytest.raises(InterruptedRunError):
                convert(folder, "memory://models/out", 2)
        convert(folder, "memory://models/out")
        assert in_store(memory, "/models/out") == expected

    def test_a_store_that_refuses_the_last_object(self, s3: S3Server, folder: Path, expected: dict[str, str]) -> None:
        def before(method: str, key: str) -> None:
            if method == "PUT" and key == f"models/out/{CONFIG}":
                raise PermissionError

        s3.before = before
        with pytest.raises(UploadError, match=r"refuses access .* the same command continues the upload") as caught:
            convert(folder, "s3://models/out")
        assert caught.value.exit_code == 1
        assert CONFIG not in objects(fsspec.filesystem("s3"), "models/out")
        s3.before = lambda method, key: None
        s3.log.clear()
        convert(folder, "s3://models/out")
        assert in_store(fsspec.filesystem("s3"), "models/out") == expected
        assert s3.received() == [f"models/out/{name}" for name in (MARKER, CONFIG, RECORD)]

    def test_an_object_of_another_size(self, memory: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put = type(memory).put_file

        def damaged(self: Any, local: str, path: str, **options: Any) -> None:
            put(self, local, path, **options)
            if path.endswith("00002-of-00003.safetensors"):
                self.pipe_file(path, b"short")

        monkeypatch.setattr(type(memory), "put_file", damaged)
        with pytest.raises(UploadError, match="has 5 bytes after the upload instead of"):
            convert(folder, "memory://models/out")
        assert CONFIG not in objects(memory, "/models/out")

    def test_two_runs_at_once(self, memory: Any, folder: Path) -> None:
        def other(*_: Any) -> None:
            memory.pipe_file(f"/models/out/{MARKER}", b'{"token": "another", "files": []}')

        with pytest.raises(OutputError, match="another run uploads to memory://models/out"):
            convert(folder, "memory://models/out", on_transfer=other)
        assert CONFIG not in objects(memory, "/models/out")

        def second(_: Any) -> None:
            with pytest.raises(OutputError, match="another process is making memory://models/two"):
                convert(folder, "memory://models/two")

        convert(folder, "memory://models/two", on_plan=second)


class TestWhatIsThere:
    """What exists under the address of a result."""

    @pytest.fixture
    def earlier(self, memory: Any, folder: Path) -> Any:
        """The store with an earlier result in two groups and more files at `memory://models/out`."""
        convert(folder, "memory://models/out", 2, max_shard_size=200_000)
        return memory

    def test_a_result_is_refused_and_replaced(
        self, earlier: Any, folder: Path, expected: dict[str, str], cache: Path
    ) -> None:
        before = objects(earlier, "/models/out")
        with pytest.raises(OutputError, match="exists already: name a new address, or replace it with --overwrite"):
            convert(folder, "memory://models/out")
        assert objects(earlier, "/models/out") == before
        assert not list((cache / "results").iterdir())
        convert(folder, "memory://models/out", overwrite=True)
        assert in_store(earlier, "/models/out") == expected
        assert set(before) - {*expected, RECORD}  # files that only the earlier result had

    def test_no_mixture_of_two_results_is_ever_there(
        self, earlier: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[set[str]] = []
        put = type(earlier).put_file

        def watched(self: Any, local: str, path: str, **options: Any) -> None:
            seen.append({name for name in (CONFIG, INDEX, RECORD) if self.exists(f"/models/out/{name}")})
            put(self, local, path, **options)

        monkeypatch.setattr(type(earlier), "put_file", watched)
        convert(folder, "memory://models/out", overwrite=True)
        assert seen[:-2] == [set()] * (len(seen) - 2)
        assert seen[-2:] == [{INDEX}, {INDEX, CONFIG}]

    @pytest.mark.parametrize("overwrite", [True, False])
    @pytest.mark.parametrize("name", ["notes.txt", ".git/HEAD", CONFIG, "model-00001-of-00007.safetensors"])
    def test_objects_of_the_user_are_never_replaced(
        self, earlier: Any, folder: Path, overwrite: bool, name: str
    ) -> None:
        """A file that this program did not write, or one that was changed after it did, in size or in content alone."""
        names = [each for each in objects(earlier, "/models/out") if each.startswith("model-")]
        name = names[0] if name.startswith("model-") else name
        path = f"/models/out/{name}"
        size = earlier.size(path) if earlier.exists(path) else 4
        earlier.pipe_file(path, b"mine" + bytes(size - 4))
        before = objects(earlier, "/models/out")
        with pytest.raises(OutputError, match=f"did not write or that were changed later \\({name}\\)"):
            convert(folder, "memory://models/out", overwrite=overwrite)
        assert objects(earlier, "/models/out") == before

    def test_objects_that_appear_during_the_conversion(self, memory: Any, folder: Path) -> None:
        def appear(_: Any) -> None:
            memory.pipe_file("/models/out/config.json", b"mine")

        with pytest.raises(OutputError, match=r"changed later \(config.json\)"):
            convert(folder, "memory://models/out", on_plan=appear)
        assert objects(memory, "/models/out") == {"config.json": b"mine"}

    def test_an_upload_that_nobody_will_finish(self, memory: Any, folder: Path, expected: dict[str, str]) -> None:
        marker = {"token": "another", "files": ["model.safetensors"]}
        memory.pipe_file(f"/models/out/{MARKER}", json.dumps(marker).encode())
        memory.pipe_file("/models/out/model.safetensors", b"half")
        with pytest.raises(OutputError, match="unfinished upload of another run"):
            convert(folder, "memory://models/out")
        convert(folder, "memory://models/out", overwrite=True)
        assert in_store(memory, "/models/out") == expected


class TestMistakes:
    """One line, exit code 2, and nothing in the store or on the disk."""

    @pytest.mark.parametrize(
        ("source", "out", "kind", "words"),
        [
            ("s3://none/model", None, StoreError, "s3://none/model does not exist .*bucket does not exist"),
            ("s3://models/nothing", None, SourceNotFoundError, "there are no objects under s3://models/nothing/"),
            ("s3://models/source/config.json", None, SourceNotFoundError, "name the prefix"),
            (
                "gs://bucket/model",
                None,
                MissingExtraError,
                "gs://bucket/model needs the package gcsfs.*: pip install gcsfs",
            ),
            ("abfs://box/model", None, MissingExtraError, "needs the package adlfs.*: pip install adlfs"),
            ("what://box/model", None, StoreError, "in no store that fsspec knows"),
            ("https://host/model", None, SourceNotFoundError, "is an address, and checkpoints are read from folders"),
            ("s3://", None, SourceNotFoundError, "is an address, and checkpoints are read from folders"),
            (None, "s3://none/out", StoreError, "s3://none/out does not exist"),
            (None, "gs://bucket/out", MissingExtraError, "gs://bucket/out needs the package gcsfs"),
            (None, "https://host/out", OutputError, "is an address, and results are written to folders"),
            ("s3://models/source", "s3://models/source", OutputError, "are the same or one in the other"),
            ("s3://models/source", "s3://models/source/out", OutputError, "are the same or one in the other"),
            ("s3://models/source", "s3://models", OutputError, "are the same or one in the other"),
        ],
    )
    def test_one_line(
        self,
        s3: S3Server,
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        source: str | None,
        out: str | None,
        kind: type[GQAConvertError],
        words: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(kind, match=words) as caught:
            convert(source or folder, out or tmp_path / "out")
        assert caught.value.exit_code == 2
        assert str(caught.value).isprintable()
        assert not s3.received()
        assert {path.name for path in tmp_path.iterdir()} <= {"cache"}

    def test_an_extra_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules["fsspec.registry"].__dict__["_registry"], "s3", raising=False)
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(MissingExtraError, match=r"needs the package s3fs.*: pip install 'gqa-convert\[s3\]'"):
            open_checkpoint("s3://models/source", stores=True)

    @pytest.mark.usefixtures("s3")
    def test_no_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fsspec.filesystem("s3").clear_instance_cache()
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(StoreError, match="there are no credentials for s3://models/source"):
            open_checkpoint("s3://models/source", stores=True)
        fsspec.filesystem("s3").clear_instance_cache()

    def test_rejected_credentials(self, s3: S3Server) -> None:
        def before(*_: str) -> None:
            raise PermissionError

        s3.before = before
        with pytest.raises(StoreError, match="the store refuses access to s3://models/source"):
            open_checkpoint("s3://models/source", stores=True)

    def test_options_that_do_not_fit(self, memory: Any, folder: Path) -> None:
        from gqa_convert.conversion.parts import Part

        with pytest.raises(SourceNotFoundError, match="has no revision 'main': omit --revision"):
            convert("memory://models/source", "memory://models/out", revision="main")
        with pytest.raises(OptionError, match="--part needs a disk that all parts share"):
            convert(folder, "memory://models/out", part=Part(1, 2))
        assert not memory.find("/models/out")

    @pytest.mark.parametrize(
        "command",
        [
            lambda address, folder: open_checkpoint(address),
            lambda address, folder: restate_checkpoint(address, folder / "out"),
            lambda address, folder: check_destination(Path(address), None, overwrite=False),
        ],
    )
    def test_other_commands_refuse_addresses(
        self, s3: S3Server, folder: Path, command: Callable[[str, Path], Checkpoint | None]
    ) -> None:
        with pytest.raises((SourceNotFoundError, OutputError), match="is an address, and") as caught:
            command("s3://models/source", folder)
        assert caught.value.exit_code == 2
        assert not s3.log


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_address("s3://bucket/a/b/") == store_address(Path("s3://bucket/a/b")) == "s3://bucket/a/b"
    for other in (
        "model",
        "org/model",
        "/models/s3",
        "~/model",
        "http://host/x",
        "file:///x",
        "s3://",
        "C:/x",
        "a::s3://b",
    ):
        assert store_address(other) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert store_address("s3://bucket") is None  # a folder of such a name is one
