"""The bundled model as one that converses."""

import json
import shutil
from pathlib import Path

from gqa_convert.demo import CHECKPOINT

CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ "
    "message['role'] }}>\n{% endfor %}"
)


def with_chat_template(folder: Path) -> Path:
    """The bundled model with a chat template."""
    shutil.copytree(CHECKPOINT, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT}))
    return folder
