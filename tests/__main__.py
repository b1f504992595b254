"""`make test`: what can run beside other tests, four files at a time; then, one after the other, what must be alone.

Arguments go to pytest, in both parts. Ends with status 1 when a test failed, and 5 when there was none to run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

import pytest

from tests.support.environment import set_defaults
from tests.support.warm_engines import warm_engines

PARTS: Mapping[str, Sequence[str]] = {
    # In the order that tests/conftest.py gives them. A process that dies is not tried again and again.
    # Four for two cores: many tests wait for services, deadlines and disks for most of their time.
    "Four files at a time": [
        "--part=beside",
        "-n4",
        "--dist=loadfile",
        "--no-loadscope-reorder",
        "--max-worker-restart=0",
    ],
    "One test at a time": ("--part=alone",),
}
# Of a part that ran to its end.
ENDED = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}


def main(arguments: Sequence[str]) -> int:
    """The exit status. After a failure in the first part the second runs as well; an interruption ends both."""
    ended: dict[str, int] = {}
    set_defaults(os.environ)
    with warm_engines(os.environ) as environment:
        for name, options in PARTS.items():
            print(f"\n{name}:", flush=True)
            ended[name] = _run([*options, *arguments], environment)
            if ended[name] not in ENDED:
                return ended[name]
    failed = [name for name, status in ended.items() if status == pytest.ExitCode.TESTS_FAILED]
    if failed:
        print("\nTests failed; each part names its own at its end:", ", ".join(failed), flush=True)
        return pytest.ExitCode.TESTS_FAILED
    return min(ended.values())


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Pytest's exit status. Told to end, this waits until pytest has ended what tests started."""
    with subprocess.Popen([sys.executable, "-m", "pytest", "--durations=15", *arguments], env=environment) as run:

        def forward(number: int, frame: FrameType | None) -> None:
            run.terminate()

        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGINT, lambda number, frame: None)  # the terminal sends it to pytest as well
        return run.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
