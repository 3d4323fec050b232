"""Fixtures of the tests that convert with the command."""

import json
from pathlib import Path

import pytest

from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.tiny import make_config, make_model


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some thousand tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(json.__file__).read_text() * 3)
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("small") / "source"
    config = make_config("llama", vocab_size=2048, num_hidden_layers=3, max_position_embeddings=128)
    make_model(config).save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    return folder
