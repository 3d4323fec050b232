"""The figures of `evaluate` against transformers' own losses and against sums that are written out
here.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from gqa_convert.data import files
from gqa_convert.data.files import Fields
from gqa_convert.data.sources import Source, open_source
from gqa_convert.errors import DataError, OptionError
from gqa_convert.measuring import no_progress
from gqa_convert.measuring.evaluation import scoring
from gqa_convert.measuring.evaluation.examples import (
    Document,
    encode,
    read_documents,
    span_material,
    text_material,
)
from gqa_convert.measuring.evaluation.run import EvaluationOptions, evaluate
from gqa_convert.measuring.evaluation.scoring import Scored, score
from tests.helpers.data_helpers import demo_tokenizer, restored
from tests.helpers.evaluate_models import POSITIONS, bart, causal, constant, t5, write_rows
from tests.helpers.largest import LargestWith
from tests.helpers.tiny import make_config, make_model

TEXT = (
    "def mean(values):\n    return sum(values) / len(values)  # ein Mittelwert: naïve, 中文, 🙂\n"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two causal models, and texts: one of several windows, and rows of different lengths."""
    folder = tmp_path_factory.mktemp("evaluate")
    causal(folder / "one")
    causal(folder / "two", seed=1)
    (folder / "long.txt").write_text(TEXT * 4, encoding="utf-8")
    write_rows(
        folder / "rows.jsonl",
        [{"text": (TEXT * 3)[: 9 + 37 * number]} for number in range(6)] + [{"text": "a"}],
    )
    return folder


def run(
    home: Path, *names: str, data: str, reference: str | None = None, **settings: Any
) -> dict[str, Any]:
    models = [str(home / name) for name in names]
    against = None if reference is None else str(home / reference)
    source, target = settings.pop("pairs", (None, None))
    options = EvaluationOptions(**({"device": "cpu", "reference": against} | settings))
    return evaluate(
        models, Source(str(home / data), source_field=source, target_field=target), options
    ).as_json()


def document(tokenizer: Any, text: str) -> Document:
    return Document(*encode(tokenizer, text))


def tokens_of(text: str) -> list[int]:
    tokenizer = demo_tokenizer()
    return [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("context", [7, POSITIONS])
def test_windows_against_a_loop_over_tokens(home: Path, context: int) -> None:
    """Each token by itself: the window is the first that reaches it."""
    ids, model, total = tokens_of(TEXT * 4), model_of(home / "one"), 0.0
    for place in range(1, len(ids)):
        window = max(0, math.ceil((place - context) / context))
        read = ids[window * context : place]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([read])).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[ids[place]])
    report = run(home, "one", data="long.txt", window=context, batch=3)
    (result,) = report["results"]
    assert result["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert (report["context"], result["tokens"], result["scored_nan"]) == (context, len(ids) - 1, 0)
    assert result["bytes"] == len((TEXT * 4).encode())
    assert result["bits_per_byte"] == pytest.approx(total / result["bytes"] / math.log(2), rel=1e-5)
    assert result["difference"] is result["kl"] is result["loss_standard_error"] is None


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    """A model of letters and one of pairs of letters give every text the same probability; they are
    not compared.
    """
    letters = "abcdefghijk"
    shares = np.random.default_rng(0).dirichlet(np.ones(len(letters)))
    pairs = [a + b for a in letters for b in letters]
    log_pairs = [math.log(shares[letters.index(a)] * shares[letters.index(b)]) for a, b in pairs]
    constant(tmp_path / "letters", ["<s>", *letters], [-1e4, *np.log(shares)], bos="<s>")
    constant(tmp_path / "pairs", ["<s>", *pairs], [-1e4, *log_pairs], bos="<s>")
    text = "".join(np.random.default_rng(1).choice(list(letters), 6000))
    (tmp_path / "text.txt").write_text(text)
    one, two = (run(tmp_path, name, data="text.txt")["results"][0] for name in ("letters", "pairs"))
    bits = -sum(math.log2(shares[letters.index(letter)]) for letter in text) / len(text)
    assert one["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert two["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert (one["tokens"], two["tokens"], one["bytes"], two["bytes"]) == (6000, 3000, 6000, 6000)
    assert two["loss"] == pytest.approx(2 * one["loss"], rel=1e-5)
    for models, reference in ((("letters", "pairs"), None), (("pairs",), "letters")):
        with pytest.raises(
            OptionError, match=r"pairs can't be compared with .*letters: their tokenizers differ"
        ):
            run(tmp_path, *models, data="text.txt", reference=reference)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    causal(tmp_path / "small", vocab_size=40)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"small produces token \d+, and the model has a vocabulary of 40"
    ):
        run(tmp_path, "small", data="text.txt")


def test_divergence_and_differences_from_a_reference(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out in float64 over the logits of each document, of different lengths in padded
    batches, which are made a few rows at a time.
    """
    monkeypatch.setattr(scoring, "_ROWS", 5)
    report = run(home, "two", "one", data="rows.jsonl", reference="one", batch=2)
    result, same = report["results"]
    models = [model_of(home / name).double() for name in ("one", "two")]
    blocks = []
    texts = [json.loads(line)["text"] for line in (home / "rows.jsonl").read_text().splitlines()]
    for text in texts:
        ids, rows = tokens_of(text), []
        for start in range(0, len(ids) - 1, POSITIONS):
            part = torch.tensor([ids[start : start + POSITIONS + 1]])
            with torch.no_grad():
                theirs, ours = (
                    model(input_ids=part[:, :-1]).logits[0].log_softmax(-1) for model in models
                )
            wanted = part[0, 1:, None]
            gap = (theirs - ours).gather(1, wanted)[:, 0]
            kl = (theirs.exp() * (theirs - ours)).sum(-1)
            rows.append(torch.stack([gap, kl, -ours.gather(1, wanted)[:, 0]], dim=1))
        blocks.append(torch.cat(rows).numpy())
    everything, sizes = np.concatenate(blocks), np.array([len(block) for block in blocks])
    assert result["loss"] == pytest.approx(everything[:, 2].mean(), rel=1e-5)
    assert (result["tokens"], result["bytes"]) == (
        len(everything),
        sum(len(text.encode()) for text in texts),
    )
    assert result["kl"] == pytest.approx(everything[:, 1].mean(), rel=1e-4)
    assert result["difference"]["loss"] == pytest.approx(everything[:, 0].mean(), rel=1e-4)
    assert result["difference"]["to"] == str(home / "one")
    count = len(blocks)
    for column, error in (
        (0, result["difference"]["loss_standard_error"]),
        (1, result["kl_standard_error"]),
    ):
        sums = np.array([block[:, column].sum() for block in blocks])
        rest = sums - everything[:, column].mean() * sizes
        assert error == pytest.approx(
            math.sqrt(count / (count - 1) * (rest**2).sum()) / sizes.sum(), rel=1e-4
        )
    own = same["difference"]
    assert [same["kl"], own["loss"], own["loss_standard_error"]] == [0, 0, 0]
    assert report["reference"]["loss"] == same["loss"]
    assert result["loss"] - same["loss"] == pytest.approx(result["difference"]["loss"])


def test_vocabularies_padded_to_different_sizes_are_compared_where_they_overlap(
    home: Path, tmp_path: Path
) -> None:
    model = model_of(home / "one")
    model.resize_token_embeddings(2057, mean_resizing=False)
    model.save_pretrained(tmp_path / "wide")
    demo_tokenizer().save_pretrained(tmp_path / "wide")
    for name, reference in ((tmp_path / "wide", home / "one"), (home / "one", tmp_path / "wide")):
        (result,) = run(home, str(name), data="long.txt", reference=str(reference))["results"]
        assert result["note"] is None
        assert result["kl"] == pytest.approx(0, abs=1e-6)


def test_span_corruption_has_transformers_own_loss(tmp_path: Path) -> None:
    t5(tmp_path / "t5")
    words = [f"w{number}" for number in np.random.default_rng(0).integers(0, 500, 400)]
    (tmp_path / "text.txt").write_text(" ".join(words))
    report = run(tmp_path, "t5", data="text.txt", window=40, batch=3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t5")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5").eval()
    made = span_material([document(tokenizer, " ".join(words))], tokenizer, start=0, length=40)
    total = 0.0
    places: dict[int, list[str]] = {}
    for number, (inputs, labels) in enumerate(made.batches(1)):
        read = inputs["input_ids"]
        assert read.shape[1] == 40
        with torch.no_grad():
            total += float(model(input_ids=read, labels=labels).loss) * labels.numel()
        places[number] = tokenizer.convert_ids_to_tokens(
            restored(read[0].tolist(), labels[0].tolist())
        )
    (result,) = report["results"]
    assert result["loss"] == pytest.approx(total / len(made.blocks), rel=1e-5)
    assert (report["objective"], result["bytes"], result["bits_per_byte"]) == ("spans", None, None)
    assert result["tokens"] == len(made.blocks)
    text = [word for place in sorted(places) for word in places[place]]
    assert text == words[: len(text)]
    assert len(text) > 300


@pytest.mark.parametrize(("kind", "batch"), [(t5, 4), (bart, 1)])
def test_pairs_have_transformers_own_loss(tmp_path: Path, kind: Any, batch: int) -> None:
    kind(tmp_path / "model")
    random = np.random.default_rng(0)
    rows = [
        {
            name: " ".join(f"w{each}" for each in random.integers(0, 500, random.integers(1, 15)))
            for name in ("a", "b")
        }
        for _ in range(9)
    ]
    write_rows(tmp_path / "pairs.jsonl", rows)
    report = run(tmp_path, "model", data="pairs.jsonl", pairs=("a", "b"), batch=batch)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    total, count = 0.0, 0
    for row in rows:
        read, labels = (torch.tensor([tokenizer(row[name])["input_ids"]]) for name in ("a", "b"))
        with torch.no_grad():
            total += float(model(input_ids=read, labels=labels).loss) * labels.numel()
        count += labels.numel()
    (result,) = report["results"]
    assert result["loss"] == pytest.approx(total / count, rel=1e-5)
    assert (result["tokens"], result["bytes"]) == (count, sum(len(row["b"]) for row in rows))
    assert report["objective"] == "pairs"
    assert (
        result["kv_bytes_per_token"] == {t5: 4 * 2 * 8 * 4, bart: 3 * 2 * 8 * 4}[kind]
    )  # of the decoder's own layers
    renamed = [{"source": row["a"], "target": row["b"]} for row in rows]
    write_rows(tmp_path / "named.jsonl", renamed)
    found = run(tmp_path, "model", data="named.jsonl", batch=batch)
    assert found["objective"] == "pairs"
    assert found["results"][0]["loss"] == result["loss"]
    if kind is t5:  # running text is none of pairs
        write_rows(
            tmp_path / "text.jsonl", [{"text": row["source"] * 20, **row} for row in renamed]
        )
        assert run(tmp_path, "model", data="text.jsonl")["objective"] == "spans"


def test_logits_are_made_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config("gemma2", final_logit_softcapping=2.0, vocab_size=2048))
    monkeypatch.setattr(scoring, "_ROWS", 5)
    with LargestWith(2048, model.config.hidden_size) as largest:
        text = [document(demo_tokenizer(), TEXT * 4)]
        score(Scored(model, text_material(text, demo_tokenizer(), window=32)), 2)
    assert largest.rows == 5


@pytest.mark.parametrize("window", [5, 1, 100])
def test_every_token_but_the_first_of_a_document_is_scored_once(window: int) -> None:
    tokenizer = demo_tokenizer()
    tokenizer.bos_token = None
    texts = (TEXT, "x", f"def {TEXT}")
    made = text_material([document(tokenizer, text) for text in texts], tokenizer, window=window)
    documents = [tokenizer(text)["input_ids"] for text in texts]
    targets = [
        token
        for example in sorted(made.examples, key=lambda each: each.blocks[0])
        for token in example.targets
    ]
    assert targets == [token for document in documents for token in document[1:]]
    assert len(made.blocks) == len(targets)
    for example in made.examples:
        assert len(example.inputs["input_ids"]) == len(example.targets) <= window
        assert example.inputs["input_ids"][1:].tolist() == example.targets[:-1].tolist()
    lengths = [len(example.inputs["input_ids"]) for example in made.examples]
    assert lengths == sorted(lengths, reverse=True)


def test_the_pieces_of_a_long_text_are_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a limit of tokens, which may end within a word."""
    monkeypatch.setattr(files, "PIECE", 60)
    tokenizer = demo_tokenizer()
    source = Source(str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    pieces = [piece.text for piece in open_source(source).pieces(Fields())]
    assert len(pieces) == 3
    (whole,) = read_documents(source, tokenizer, None, no_progress)
    expected = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
    assert whole.ids.tolist() == expected
    assert whole.sizes.sum() == len(TEXT.encode())
    for limit in range(1, len(expected) + 1):
        (part,) = read_documents(source, tokenizer, limit, no_progress)
        assert part.ids.tolist() == expected[:limit]
        assert part.sizes.tolist() == whole.sizes.tolist()[:limit]
