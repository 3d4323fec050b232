"""Text that a model generates: reproducible, resumable, and what transformers' `generate` gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.data.sources import Source, open_source
from gqa_convert.errors import DataError, InterruptedRunError, OptionError, StoppedError
from gqa_convert.text import generating
from gqa_convert.text.generating import GenerationOptions, generate_text
from tests.helpers.uptrain_runs import DEMO

SMALL: dict[str, Any] = {"tokens": 60, "length": 8, "batch": 2}


def write(out: Path, **changes: Any) -> None:
    generate_text(open_checkpoint(str(DEMO)), out, GenerationOptions(**SMALL | changes))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that was not interrupted."""
    path = tmp_path_factory.mktemp("unbroken") / "text.jsonl"
    write(path)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts) > 40
    return path


def hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def test_a_seed_determines_the_text(unbroken: Path, tmp_path: Path) -> None:
    write(tmp_path / "again.jsonl")
    write(tmp_path / "other.jsonl", seed=1)
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
        write(out)
    assert not out.exists()
    with hidden(out).open("ab") as file:
        file.write(b'{"rows": [{"text": "torn')  # by a kill in the middle of a write
    write(out)
    assert out.read_bytes() == unbroken.read_bytes()
    assert asked[:4] == [0, 1, 2, 2]
    assert not hidden(out).exists()


def test_without_sampling_it_is_greedy_decoding(tmp_path: Path) -> None:
    """Texts begin with the most likely first tokens, one each."""
    write(tmp_path / "text.jsonl", temperature=0)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        order = model(torch.tensor([[begin]])).logits[0, -1].argsort(descending=True, stable=True).tolist()
    likely = [token for token in order if token not in tokenizer.all_special_ids]
    texts = [json.loads(line)["text"] for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    expected = []
    for first in likely[: 2 * len(texts)]:
        ids = torch.tensor([[begin, first]])
        made = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
        expected.append(tokenizer.decode(made[0, 1:], skip_special_tokens=True))
    assert texts == [text for text in expected if text.strip()][: len(texts)]
    assert len(texts) > 2


@pytest.mark.parametrize(
    ("options", "message"), [({"temperature": -1}, "temperature is -1"), ({"tokens": 0}, "tokens is 0")]
)
def test_mistakes(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        write(tmp_path / "text.jsonl", **options)
    assert list(tmp_path.iterdir()) == []


def test_self_is_no_source_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is the text that a model writes itself"):
        open_source(Source("self"), tmp_path)
