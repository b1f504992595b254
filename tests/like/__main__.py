"""`make like`: draws random requests of every kind by a whole suite, and each picture again.

The suite has every service, two workers that are a pair, and LoRAs that come late. Ends with status 1 for any fault.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.like.replays import describe, draw_and_replay
from tests.like.requests import RandomRequests
from tests.like.suite import LATE_LORAS, LORAS, running_suite


def main() -> int:
    """Print the table by kind; return the exit status."""
    parser = argparse.ArgumentParser(prog="make like", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="(default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    parser.add_argument("--pair", action="store_true", help="two workers that compute rows of each other")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_suite(folder / "suite", pair=options.pair) as client:
            began_s = time.monotonic()
            requests = RandomRequests(random.Random(options.seed), loras=LORAS, late_loras=LATE_LORAS)
            tally = draw_and_replay(client, requests, options.requests, folder)
            took_s = time.monotonic() - began_s
    for request, reason in tally.refused:
        print(f"refused: {request.kind}: {reason}")
    print(describe(tally.faults))
    print("\n".join(tally.table()))
    print(f"{options.requests} requests and their {len(tally.replays)} pictures again in {took_s:.0f} s")
    return bool(tally.faults or tally.refused)


if __name__ == "__main__":
    sys.exit(main())
