"""The environment of a process that computes: how its threads wait, and how its memory is paged.

Each operator of a network is split between threads, which then wait for the next operator. Sleeping threads cost
nothing but take some 50 microseconds to wake. Spinning threads begin at once, but take the core from other processes.
All threads sleep if a process has more of them than cores, which `bottega.diffusion.device.threads` prevents.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# How many loop turns libgomp's threads spin before they sleep: some tens of microseconds, about the time between two
# operators. Measured with two threads on two cores, 0 against 10,000: a forward of SDXL's topology at a quarter of its
# width 1.57 s and 1.18 s, one of an edit .50 s and .28 s; with a second such process 2.3 s and 2.9 s, .48 s and .99 s.
# Without a bound ("active") two processes slow each other down 80-fold.
_TURNS = 10_000
# glibc asks for huge pages if the system leaves that to programs (transparent_hugepage=madvise, as in Debian). In the
# same forwards it saved 6,700 page faults, 1 % of the time of a full one, and 3 to 5 % of an edit's.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def engine_environment(*, exclusive_cores: bool) -> Mapping[str, str]:
    """Return the variables to set before torch is imported. An operator's own GLIBC_TUNABLES stay.

    Args:
        exclusive_cores: No other process computes on these cores. Otherwise threads sleep while they wait.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(_TURNS if exclusive_cores else 0),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES") or _HUGE_PAGES,
    }
