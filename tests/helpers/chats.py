"""Conversations, a chat template for them, and their tokens by the template itself."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.data_helpers import demo_tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TEXTS = [
    "def f(x):",
    "  return x + 1",
    "why?",
    "because of the sum.",
    "class A:\n    pass",
    "ünïcode 🙂 text",
]
LENGTH = 16


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


CHATS = [
    said(*TEXTS[:2]),
    said(*TEXTS[2:6]),
    [{"role": "system", "content": "Be brief."}, *said(TEXTS[0], TEXTS[5])],
    said(TEXTS[4]),
    said(*TEXTS[:4], *TEXTS[2:4]),
] * 3


def tokenizer_with(template: str | None) -> Any:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rows_file(folder: Path, rows: list[Any], name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rendered(tokenizer: Any) -> list[int]:
    """The tokens of all conversations by the template."""
    return [
        token for chat in CHATS for token in tokenizer.apply_chat_template(chat, return_dict=False)
    ]
