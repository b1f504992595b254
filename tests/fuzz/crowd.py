"""Several callers at once, each with the fixed corpus in an order of its own.

What one of them does changes what another gets, so only what no answer may ever be is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from tests.fuzz.calls import calling
from tests.fuzz.case import Case
from tests.fuzz.house import House
from tests.fuzz.judging import fault

# Those of a gateway that draw or look after jobs; a worker has one caller, the gateway.
_METHODS = frozenset(
    {"Generate", "SubmitJob", "GetJob", "ListJobs", "WatchJob", "CancelJob", "GetImage", "GetJobTrace"}
)


def crowd(
    house: House, methods: Collection[str] = _METHODS, *, callers: int, seed: int, most: int | None = None
) -> list[str]:
    """What was wrong. methods: of which those that fit are called. most: cases of each caller; all without it."""
    called = _METHODS.intersection(methods)
    cases = [case for case in house.corpus() if case.method in called]
    orders = [random.Random(seed + number).sample(cases, len(cases))[:most] for number in range(callers)]
    with ThreadPoolExecutor(callers) as pool:
        return [*chain.from_iterable(pool.map(lambda order: list(_wrong(house, order)), orders))]


def _wrong(house: House, cases: Sequence[Case]) -> Iterator[str]:
    with calling(*house.called) as caller:
        for case in cases:
            problem = fault(case.method, case.raw, caller.call(case.method, case.raw))
            if problem:
                yield f"{case.method}, {case.name}, among others: {problem}"
