"""By how many threads an engine computes on a CPU, and that no other thread of its process shares work out.

libgomp's threads wait awake for the next operator only while its threads are no more than cores, over all teams of the
process. A team belongs to the thread that shares work out and lasts as long as that one: another thread that shares out
once, while it loads weights or writes a LoRA, leaves the engine's threads asleep between any two operators from then
on. Measured by turns on two cores of an EPYC, a step of bench-day's model: 1.3 to 2.0 s for 1.0 to 1.2, one of an edit
1.0 to 1.4 s for .4 to .6.
"""

from __future__ import annotations

import threading

import torch


def compute_with(threads: int) -> None:
    """The calling thread computes with so many, 0 for as many as torch chooses; threads that begin to use torch later
    compute alone. Those that had begun before keep what they have.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    # The number belongs to a thread, which takes the last that was set anywhere when it asks for the first time: now.
    torch.get_num_threads()
    other = threading.Thread(target=compute_alone, name="number of threads")
    other.start()
    other.join()


def compute_alone() -> None:
    """The calling thread shares nothing out, nor does one that begins to use torch after it.

    For a thread whose first operator may be a product of matrices: MKL knows only then what torch was told before.
    """
    torch.set_num_threads(1)
