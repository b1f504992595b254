"""Sets the number of compute threads of an engine on a CPU, and keeps other threads of the process single-threaded.

libgomp's threads wait awake for the next operator only while there are at most as many as cores, over all teams of the
process. A team belongs to the thread that divides its work, and lives as long as that thread. If another thread divides
work once, while it loads weights or writes a LoRA, the engine's threads sleep between any two operators from then on.
Measured in alternation on two cores of an EPYC: a step of bench-day's model took 1.3 to 2.0 s instead of 1.0 to 1.2,
and a step of an edit 1.0 to 1.4 s instead of .4 to .6.
"""

from __future__ import annotations

import threading

import torch


def compute_with(threads: int) -> None:
    """Set the number of threads for operators of the calling thread; 0 means as many as torch chooses.

    Threads that begin to use torch later compute with one thread. Threads that began before keep their number.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    # Each thread has its own number. When it first asks, which is here, it takes the last one that any thread has set.
    torch.get_num_threads()
    other = threading.Thread(target=compute_alone, name="number of threads")
    other.start()
    other.join()


def compute_alone() -> None:
    """Make the calling thread, and those that begin to use torch after it, compute with one thread.

    For threads whose first operator may be a matrix product, because only then does MKL read the number that was set
    before.
    """
    torch.set_num_threads(1)
