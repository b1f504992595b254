"""`make test`: what can run beside other tests, four files at a time; then, one after the other, what must be alone.

Arguments go to pytest. Ends with its status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from tests.support.environment import set_defaults
from tests.support.forked_services import forked_services
from tests.support.warm_engines import warm_engines

# Four for two cores: many tests wait for services, deadlines and disks for most of their time.
OPTIONS = ("--processes=4", "--durations=30")


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit status. Told to end, this waits until pytest has ended what tests started."""
    set_defaults(os.environ)
    with (
        warm_engines(os.environ) as environment,
        forked_services(environment) as forking,
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS, *arguments], env=forking.environment, pass_fds=[forking.file]
        ) as run,
    ):

        def forward(number: int, frame: FrameType | None) -> None:
            run.terminate()

        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGINT, lambda number, frame: None)  # the terminal sends it to pytest as well
        return run.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
