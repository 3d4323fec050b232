"""Documents of a block that are kept apart: the loss is that of each by itself, and models that
read across them are refused.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

from gqa_convert.data.encoders import LAST
from gqa_convert.data.sampler import IGNORED
from gqa_convert.data.token_files import TokenSource
from gqa_convert.errors import RecipeError
from gqa_convert.training.models import check_apart
from tests.helpers.data_helpers import open_samples
from tests.helpers.uptrain_runs import in_float32, losses, make_student, run

KEYS: dict[str, Any] = {"tokens": 64, "document_masks": True}
"""One step on two blocks of 32 tokens."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A student, and documents of a few words."""
    folder = make_student(tmp_path_factory.mktemp("home"))
    in_float32(folder / "student")
    chance = random.Random(0)
    words = ["one", "two", "for", "return"]
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(100)]
    rows = [json.dumps({"text": text}) for text in texts]
    (folder / "short.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


def test_positions_start_anew_with_each_document() -> None:
    ends = [False, True, True, False, False, False, True, False]
    source = TokenSource(np.array([7 | LAST if end else 7 for end in ends], np.uint32))
    assert source.positions(0, 8).tolist() == [0, 1, 0, 0, 1, 2, 3, 0]
    # inside a document, and around the end of the source
    assert source.positions(4, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_the_loss_is_that_of_each_document_by_itself(home: Path, tmp_path: Path) -> None:
    data = str(home / "short.jsonl")
    run(home, tmp_path / "apart", data=data, **KEYS)
    run(home, tmp_path / "across", data=data, **KEYS | {"document_masks": False})

    samples = open_samples(
        data,
        AutoTokenizer.from_pretrained(home / "student"),
        objective="causal",
        sequence_length=32,
        documents_apart=True,
    )
    batch = samples.batch([0, 1])
    model = AutoModelForCausalLM.from_pretrained(home / "student")
    summed = count = documents = 0.0
    for ids, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        documents += len(starts) - 1
        for start, end in itertools.pairwise(starts):
            with torch.no_grad():
                logits = model(torch.tensor(ids[None, start:end])).logits[0]
            wanted = torch.tensor(labels[start:end])
            summed += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            count += int((wanted != IGNORED).sum())
    assert documents > 8
    [apart], [across] = losses(tmp_path / "apart"), losses(tmp_path / "across")
    assert apart == pytest.approx(summed / count, rel=1e-5)
    assert across != pytest.approx(apart, rel=1e-3)


def test_a_model_that_reads_across_is_refused() -> None:
    sizes = {"hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = OPTForCausalLM(OPTConfig(vocab_size=96, word_embed_proj_dim=24, dropout=0.0, **sizes))
    with pytest.raises(RecipeError, match="a opt reads across the beginning of a document"):
        check_apart(model.train())
