"""Settings of the whole suite."""

import os

# two workers share the machine's cores; tiny models gain nothing from threads. Before anything imports torch, and for
# subprocesses too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
