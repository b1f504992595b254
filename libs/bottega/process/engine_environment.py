"""The environment that a process which computes is started with: how its threads wait, and how its memory is paged.

An operator of a network is shared out to threads, which then wait for the next one. Asleep they cost nobody anything
and take some 50 microseconds to wake; awake they begin at once, and take the core from whoever else computes there.
All sleep where a process has more of them than cores: `bottega.diffusion.device.threads` sees to it that it has not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Turns of a loop that libgomp's threads wait awake before they sleep: some tens of microseconds, about as long as what
# lies between two operators. Measured with two threads on two cores, 0 against 10,000: a forward of SDXL's topology at
# a quarter of its width 1.57 s and 1.18 s, one of an edit .50 s and .28 s; beside another one the same forwards 2.3 s
# and 2.9 s, .48 s and .99 s. Without a bound ("active") two processes slow each other down 80-fold.
_TURNS = 10_000
# glibc asks for huge pages where the system leaves that to programs (transparent_hugepage=madvise, as Debian has it).
# The same forwards: 6,700 page faults less, 1 % of the time in full, 3 to 5 % of an edit's.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def engine_environment(*, exclusive_cores: bool) -> Mapping[str, str]:
    """Variables that have to be there before torch is imported. An operator's own GLIBC_TUNABLES stay.

    exclusive_cores: no other process computes on these cores; without it threads sleep while they wait.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(_TURNS if exclusive_cores else 0),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES") or _HUGE_PAGES,
    }
