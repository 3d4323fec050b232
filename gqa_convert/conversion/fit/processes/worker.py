"""A further process of a calibrated conversion, as `launching` starts it: it does its share of one call and ends.

Run as `main(FOLDER, RANK, SIZE, DEVICE)`, with a pipe from the first process as standard input.
"""

import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path

from gqa_convert.conversion.fit.processes.group import LostProcessError
from gqa_convert.conversion.fit.processes.joining import joined
from gqa_convert.conversion.fit.processes.messages import LOST, Job, failure_file, job_file, ready_file, write_failure


def main(folder: Path, rank: int, size: int, device: str) -> None:
    """Take part in the call that the folder describes, and end this process with an exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):  # which reach the first process too; it ends this one
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    try:
        job: Job = pickle.loads(job_file(folder).read_bytes())
        ready_file(folder, rank).touch()
        with joined(folder, rank, device, size) as processes:
            job.run(device, processes)
    except LostProcessError:
        os._exit(LOST)
    except Exception as problem:
        traceback.print_exc()
        write_failure(failure_file(folder, rank), problem)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # at once, for which the first process waits


def _end_with_the_first() -> None:
    """Wait until the first process has ended in whatever way, which closes the pipe."""
    while os.read(0, 1):
        pass
    os._exit(LOST)
