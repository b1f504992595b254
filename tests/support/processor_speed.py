"""Bounds of processor time, as they are on the machine that runs the tests.

They are said for a core that runs `_work` in `_QUICK_S` (AMD EPYC, 2026, nothing beside). A virtual machine whose
neighbours are busy is charged twice as much for the same work at times, and so is an old one.
"""

from __future__ import annotations

import json
import resource
import time

_QUICK_S = 0.0055
_ROUNDS = 9


def on_this_machine(seconds: float) -> float:
    """What takes `seconds` of processor time on a quick core takes this much here and now; never less than `seconds`.

    Call it right after what was measured.
    """
    return seconds * max(1.0, min(_work() for _ in range(_ROUNDS)) / _QUICK_S)


def seconds_of_children() -> float:
    """Return the processor time of the child processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _work() -> float:
    """Processor seconds of some plain Python, with the objects, dicts, strings and sorting that services have."""
    began_s = time.thread_time()
    groups: dict[int, list[str]] = {}
    for number in range(20_000):
        groups.setdefault(number % 997, []).append(f"{number % 997}/{number}")
    largest = sorted((len(names), group) for group, names in groups.items())
    json.loads(json.dumps([groups[group] for _, group in largest[:400]]))
    return time.thread_time() - began_s
