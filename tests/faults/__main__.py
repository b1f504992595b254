"""`make faults`: makes one realistic mistake after the other in a copy of the tree, and sees a test fail for each.

    python -m tests.faults              all of them, two at a time
    python -m tests.faults --look       only whether their texts and tests are where they can be found
    python -m tests.faults --only lease those whose description says so

A mistake is a line of faults.toml: a text of libs or services that stands there once, what it becomes, what that
breaks, and the tests that see it, by name. Ends with status 1 when one was missed, or could not be tried.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.faults.catalogue import Fault, Place, read_faults
from tests.faults.trial import Outcome, try_all


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.faults", description="Sees that tests catch realistic mistakes.")
    parser.add_argument("--look", action="store_true", help="run nothing: say which faults cannot be tried")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose description has this text")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="trials at a time")
    options = parser.parse_args(arguments)
    faults = [fault for fault in read_faults() if options.only in fault.breaks]
    placed = [(fault, place) for fault in faults if isinstance(place := fault.place(), Place)]
    lost = [(fault, place) for fault in faults if isinstance(place := fault.place(), str)]
    for fault, why in lost:
        print(f"LOST    {fault.breaks}: {why}", flush=True)
    if options.look:
        print(f"{len(placed)} of {len(faults)} faults can be tried")
        return 1 if lost else 0
    outcomes = try_all(placed, at_once=options.at_once, report=_report)
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(faults)} faults were caught")
    return 0 if caught == len(faults) else 1


def _report(fault: Fault, outcome: Outcome) -> None:
    print(f"{outcome.word:7} {outcome.seconds:4.0f} s  {fault.breaks}", flush=True)
    if not outcome.caught:
        print(outcome.said, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
