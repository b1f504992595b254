"""`make fuzz`: the fixed corpus and thousands of mutated requests to every method of a real gateway and worker.

Prints a table and, as its last line, one JSON object. Ends with status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.fuzz.calls import SERVICES
from tests.fuzz.crowd import crowd
from tests.fuzz.fuzzing import Tally, fuzz
from tests.fuzz.house import House, replay, running_house
from tests.fuzz.http_requests import fuzz_http
from tests.support.services import Services

# Of the requests of each method before memory is looked at for the first time: a tenth, within these bounds. Fewer do
# not fill what the gateway remembers: it grew by 11 MiB after 100, and by 3 after 200.
_WARM_UP = range(300, 1000)
# Those of a costly method fill nothing that grows after so many seconds.
_WARM_UP_S = 10.0
# For what was cancelled to be over, what is swept to be swept, and what was freed to be given back: a gateway looks
# every 5 s whether it was at rest for so long.
_SETTLE_S = 12.0
_MOST_GROWTH_BYTES = 4 << 20
# Who send the fixed corpus at once.
_CALLERS = 8
_MOST_GROWTH = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.run", description="Sends bad requests to every method.")
    parser.add_argument(
        "--requests", type=int, default=10_000, help="of each method, the first of them to warm up (default 10000)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="limit for each method, and a third of it to warm up (default none)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--methods", nargs="*", choices=sorted(SERVICES), default=list(SERVICES), help="only these")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    with (
        tempfile.TemporaryDirectory(prefix="bottega-fuzz-") as folder,
        Services(Path(folder)) as services,
        running_house(services) as house,
    ):
        return _run(house, chosen.methods, chosen.requests, chosen.seconds, chosen.seed)


def _run(house: House, methods: list[str], requests: int, seconds: float, seed: int) -> int:
    began = time.monotonic()
    wrong = replay(house, (case for case in house.corpus() if case.method in methods))
    print(f"the fixed corpus took {time.monotonic() - began:.0f} s", flush=True)
    warm_up, warm_up_s = min(requests, max(_WARM_UP.start, min(_WARM_UP.stop, requests // 10))), seconds / 3
    tallies = {method: fuzz(house, method, warm_up, seed, seconds=min(_WARM_UP_S, warm_up_s)) for method in methods}
    print(f"with the warm-up, {time.monotonic() - began:.0f} s", flush=True)
    before = _settled(house)
    print(
        f"{'method':<18}{'requests':>9}{'accepted':>9}{'refused':>9}{'internal':>9}{'found':>7}{'seconds':>9}",
        flush=True,
    )
    for method in methods:
        began = time.monotonic()
        tally = tallies[method] = fuzz(house, method, requests, seed + 1, tallies[method], seconds=seconds)
        refused = tally.requests - tally.accepted
        print(
            f"{method:<18}{tally.requests:>9}{tally.accepted:>9}{refused:>9}{tally.internal:>9}{len(tally.found):>7}"
            f"{time.monotonic() - began:>9.1f}",
            flush=True,
        )
    growth = _growth(before, _settled(house)) if not house.dead() else {}
    # Last, because memory that many large requests at once have taken is given back during what comes after.
    if not house.dead():
        began = time.monotonic()
        wrong += crowd(house, methods, callers=_CALLERS, seed=seed)
        print(f"\n{_CALLERS} callers at once took {time.monotonic() - began:.0f} s", flush=True)
    wrong += _fuzz_http(house, requests // 20, seed)
    return _report(house, tallies, wrong, growth)


def _fuzz_http(house: House, requests: int, seed: int) -> list[str]:
    """Send so many requests to each operation of the HTTP API. Return what was wrong."""
    began = time.monotonic()
    answers = fuzz_http(house.http.address, requests, seed)
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(answers.statuses.items()))
    print(f"\nHTTP, by status: {counts}; {time.monotonic() - began:.0f} s", flush=True)
    return answers.found


def _settled(house: House) -> Mapping[str, int]:
    time.sleep(_SETTLE_S)
    return house.memory_bytes()


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
    """Bytes before, and bytes more now, of every process that was there all the time."""
    return {name: (before[name], after[name] - before[name]) for name in before if name in after}


def _report(house: House, tallies: Mapping[str, Tally], wrong: list[str], growth: Mapping[str, tuple[int, int]]) -> int:
    print(f"\n{'process':<32}{'MiB':>9}{'grown':>9}")
    for name, (size, more) in growth.items():
        print(f"{name:<32}{size / 2**20:>9.1f}{more / 2**20:>9.1f}")
    found = [*wrong, *(line for tally in tallies.values() for line in tally.found), *house.errors()]
    for line in found:
        print(f"\nFOUND {line}")
    grown = max((more for _, more in growth.values()), default=0)
    too_much = any(more > max(_MOST_GROWTH_BYTES, _MOST_GROWTH * size) for size, more in growth.values())
    crashes = len(house.dead()) + house.engines_lost()
    result = {
        "rpcs": len(tallies),
        "requests": sum(tally.requests for tally in tallies.values()),
        "crashes": crashes,
        "internal": sum(tally.internal for tally in tallies.values()) + len(house.errors()),
        "growth_mib": round(grown / 2**20, 2),
        "found": len(found),
    }
    print(json.dumps(result))
    return 1 if crashes or found or too_much else 0


if __name__ == "__main__":
    sys.exit(main())
