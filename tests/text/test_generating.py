"""Text that a model generates: reproducible, resumable, and what transformers' `generate` gives."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqa_convert.errors import DataError, GQAConvertError, InterruptedRunError, OptionError, OutputError, StoppedError
from gqa_convert.text import generating
from gqa_convert.text.generating import GenerationOptions, generate_text
from gqa_convert.text.sources import Source, open_source
from tests.helpers.uptrain_runs import DEMO

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
SMALL: dict[str, Any] = {"tokens": 60, "length": 8, "batch": 2}
PROMPTS = ["def sort(values):", "import os", "class Reader:\n"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that was not interrupted."""
    path = tmp_path_factory.mktemp("unbroken") / "text.jsonl"
    made = generate_text(DEMO, path, GenerationOptions(**SMALL))
    assert made.tokens >= 60
    assert made.resumed_tokens == 0
    assert len(path.read_text().splitlines()) == made.rows
    return path


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def test_a_seed_determines_the_text(unbroken: Path, tmp_path: Path) -> None:
    generate_text(DEMO, tmp_path / "again.jsonl", GenerationOptions(**SMALL))
    generate_text(DEMO, tmp_path / "other.jsonl", GenerationOptions(**SMALL, seed=1))
    assert (tmp_path / "again.jsonl").read_bytes() == unbroken.read_bytes() != (tmp_path / "other.jsonl").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"again.jsonl", "other.jsonl"}


def test_a_resumed_file_is_the_unbroken_one(unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, batch, asked = tmp_path / "text.jsonl", generating._Writer.batch, list[int]()

    def stops(self: Any, number: int) -> Any:
        asked.append(number)
        if number == 2 and asked.count(2) == 1:
            raise InterruptedRunError("stopped by SIGTERM: no partial result was written")
        return batch(self, number)

    monkeypatch.setattr(generating._Writer, "batch", stops)
    with pytest.raises(StoppedError, match="which are kept"):
        generate_text(DEMO, out, GenerationOptions(**SMALL))
    assert not out.exists()
    with hidden(out).open("ab") as file:
        file.write(b'{"rows": [{"text": "torn')  # by a kill in the middle of a write
    with pytest.raises(OutputError, match="with other settings"):
        generate_text(DEMO, out, GenerationOptions(**SMALL, seed=1))
    made = generate_text(DEMO, out, GenerationOptions(**SMALL))
    assert out.read_bytes() == unbroken.read_bytes()
    assert asked[:4] == [0, 1, 2, 2]
    assert 0 < made.resumed_tokens < made.tokens
    assert not hidden(out).exists()


@pytest.mark.parametrize("batch", [1, 3])
def test_without_sampling_it_is_greedy_decoding(batch: int, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    options = GenerationOptions(tokens=1000, length=8, batch=batch, temperature=0, prompts=str(rows))
    generate_text(DEMO, tmp_path / "text.parquet", options)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO), AutoTokenizer.from_pretrained(DEMO)
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
        expected.append({"text": prompt + tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)})
    assert pq.read_table(tmp_path / "text.parquet").to_pylist() == expected


def test_texts_without_prompts_differ_without_sampling(tmp_path: Path) -> None:
    generate_text(DEMO, tmp_path / "text.jsonl", GenerationOptions(**SMALL, temperature=0))
    texts = (tmp_path / "text.jsonl").read_text().splitlines()
    assert len({*texts}) == len(texts) > 2


def test_prompts_of_a_chat_model_become_conversations(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("sort a list\n\nopen a file\n")
    out = tmp_path / "chats.jsonl"
    made = generate_text(
        chat_model, out, GenerationOptions(**SMALL | {"tokens": 30}, prompts=str(tmp_path / "prompts.txt"))
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == made.rows
    assert [row["messages"][0]["content"] for row in rows][:2] == ["sort a list", "open a file"]
    assert all(row["messages"][1]["role"] == "assistant" for row in rows)
    assert "chat" in open_source(Source(str(out)), tmp_path, chats=True).identity()[2]


def test_an_existing_file_is_kept(unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        generate_text(DEMO, out, GenerationOptions(**SMALL))
    assert out.read_text() == "mine"
    generate_text(DEMO, out, GenerationOptions(**SMALL), overwrite=True)
    assert out.read_bytes() == unbroken.read_bytes()


@pytest.mark.parametrize(
    ("out", "options", "error", "message"),
    [
        ("text.txt", {}, OutputError, "neither .jsonl nor .parquet"),
        ("no/text.jsonl", {}, OutputError, "does not exist"),
        ("text.jsonl", {"temperature": -1}, OptionError, "--temperature is -1"),
        ("text.jsonl", {"top_p": 0}, OptionError, "--top-p is 0"),
        ("text.jsonl", {"tokens": 0}, OptionError, "--tokens is 0"),
        ("text.jsonl", {"prompts": "nowhere.txt"}, DataError, "are not a file"),
        ("text.jsonl", {"prompts": "empty.txt"}, DataError, "holds no prompt"),
        ("text.jsonl", {"prompts": "chats.jsonl"}, DataError, "has no chat template"),
        ("text.jsonl", {"prompts": "long.txt"}, DataError, "shorten it"),
    ],
)
def test_mistakes(
    out: str,
    options: dict[str, Any],
    error: type[GQAConvertError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n")
    Path("long.txt").write_text("word " * 2000)
    Path("chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    before = {*tmp_path.iterdir()}
    with pytest.raises(error, match=message):
        generate_text(DEMO, out, GenerationOptions(**SMALL | options))
    assert {*tmp_path.iterdir()} == before


def test_self_is_no_source_but_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gqa-convert generate-text"):
        open_source(Source("self"), tmp_path)
