"""Stands in for llama.cpp's converter in tests: a file that names the checkpoint."""

import json
import sys
from pathlib import Path

folder, outtype, file = sys.argv[1], sys.argv[3], sys.argv[5]
config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
if config["model_type"] != "llama":
    sys.exit(f"Model {config['model_type']} is not supported")
if not Path(folder, "tokenizer.json").is_file():
    sys.exit("no tokenizer")
Path(file).write_text(f"{folder}\n{outtype}", encoding="utf-8")
