"""How a process ends."""

import subprocess
import sys

ENDING = """
import atexit, os, signal, threading
from gqa_convert.cli.running import run

class Late:
    def __del__(self):
        raise ValueError("of a library, while Python ends")

def app(**options):
    atexit.register(lambda: Late() and None)
    os.kill(os.getpid(), signal.{signal})

run(app)
"""


def test_a_signal_ends_in_one_line_whatever_libraries_do_at_the_end() -> None:
    for name in ("SIGINT", "SIGTERM"):
        ended = subprocess.run(
            [sys.executable, "-c", ENDING.format(signal=name)], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 130
        assert ended.stderr == f"gqa-convert: stopped by {name}: no partial result was written\n"
