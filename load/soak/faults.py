"""Faults of a soak: one after the other, of any kind, in any service; the same for the same seed."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from load.soak.suite import SoakSuite

EVERY_S = 60.0
# Beyond a lease, or well within it.
_FROZEN_S = (0.5, 4.0)
# After a crash, before systemd starts it again.
_AWAY_S = 2.0
KILL_ENGINE = "kill the engine of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one service."""

    kind: str
    """One of KINDS."""
    service: str
    """The service's name."""
    seconds: float
    """Seconds for which it is frozen, or away."""

    def __str__(self) -> str:
        return f"{self.kind} {self.service}"


def _kill(suite: SoakSuite, fault: Fault, wait: Callable[[float], object]) -> None:
    suite.kill(fault.service)
    wait(fault.seconds)
    suite.start(fault.service)


def _restart(suite: SoakSuite, fault: Fault, wait: Callable[[float], object]) -> None:
    suite.stop(fault.service)
    suite.start(fault.service)


def _freeze(suite: SoakSuite, fault: Fault, wait: Callable[[float], object]) -> None:
    suite.freeze(fault.service, fault.seconds)


def _kill_engine(suite: SoakSuite, fault: Fault, wait: Callable[[float], object]) -> None:
    suite.kill_engine(fault.service)


KINDS: Mapping[str, Callable[[SoakSuite, Fault, Callable[[float], object]], None]] = {
    "kill": _kill,
    "restart": _restart,
    "freeze": _freeze,
    KILL_ENGINE: _kill_engine,
}


def planned(suite: SoakSuite, seed: int) -> Iterator[Fault]:
    """Yield faults, without end."""
    chance = random.Random(f"{seed} faults")
    while True:
        kind = chance.choice(sorted(KINDS))
        service = chance.choice(suite.engines if kind == KILL_ENGINE else suite.names)
        seconds = chance.choice(_FROZEN_S) if kind == "freeze" else _AWAY_S
        yield Fault(kind=kind, service=service, seconds=seconds)


class Faults:
    """Plays one fault every so often, in a thread of its own, until its `with` block ends.

    Args:
        suite: Whose services fail.
        seed: Of the faults.
        told: Is called with each fault that begins.
        every_s: Seconds from fault to fault.
        again_after_s: Seconds after which the faults are those of the beginning again.

    Attributes:
        done: Faults of each kind that were played.
        failed: Why no more could be played; a service that does not come back is a finding.
    """

    def __init__(
        self,
        suite: SoakSuite,
        *,
        seed: int,
        told: Callable[[Fault], None],
        every_s: float = EVERY_S,
        again_after_s: float = math.inf,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.failed: Exception | None = None
        self._suite = suite
        self._seed = seed
        self._again_after_s = again_after_s
        self._told = told
        self._every_s = every_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults")

    def __enter__(self) -> Faults:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        faults, began_s, again = planned(self._suite, self._seed), time.monotonic(), False
        try:
            while not self._ending.wait(self._every_s):
                if not again and time.monotonic() - began_s > self._again_after_s:
                    faults, again = planned(self._suite, self._seed), True
                fault = next(faults)
                self._told(fault)
                KINDS[fault.kind](self._suite, fault, self._ending.wait)
                self.done[fault.kind] += 1
        except Exception as error:  # noqa: BLE001 - what went wrong is the run's result
            self.failed = error
