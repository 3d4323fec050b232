"""Write the SHA-256 of the modelling files into released.json, as those of the package's version.

    python tools/release_modeling.py

Published results hold copies of these files. `verify` accepts those of every release in the list,
and `verify --refresh` replaces them by the newest, so that entries of versions that were published
must stay as they are.
"""

import hashlib
import json

from gqa_convert._version import __version__
from gqa_convert.families.family import MODELING
from gqa_convert.families.released import TESTED

LIST = MODELING / "released.json"


def current() -> dict[str, object]:
    """The entry of the package's version."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(MODELING.glob("gqa_*.py"))
    }
    return {"transformers": TESTED, "files": files}


if __name__ == "__main__":
    stated = json.loads(LIST.read_text()) if LIST.exists() else {}
    LIST.write_text(json.dumps(stated | {__version__: current()}, indent=2) + "\n")
