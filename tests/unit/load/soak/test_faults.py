"""Faults of a soak: planned the same for the same seed, played one after the other, and what of them fails is said."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

from load.soak.faults import KILL_ENGINE, KINDS, Fault, Faults, planned

NAMES = ("gateway", "cache", "worker-a")
ENGINES = ("worker-a",)


@dataclass
class Suite:
    """Notes what happens to it. enough: is set after so many calls. broken: a service that does not come back."""

    names: tuple[str, ...] = NAMES
    engines: tuple[str, ...] = ENGINES
    calls: list[tuple[str, str]] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    broken: str = ""

    def start(self, name: str) -> None:
        self._note("start", name)
        if self.broken:
            raise AssertionError(f"{name} has not come back")

    def kill(self, name: str) -> None:
        self._note("kill", name)

    def stop(self, name: str) -> None:
        self._note("stop", name)

    def freeze(self, name: str, seconds: float) -> None:
        assert 0 < seconds < 10
        self._note("freeze", name)

    def kill_engine(self, name: str) -> bool:
        self._note("kill_engine", name)
        return name.startswith("worker")

    def _note(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        if len(self.calls) >= 12:
            self.enough.set()


def test_a_seed_has_its_faults_and_every_service_and_kind_comes() -> None:
    first = list(islice(planned(Suite(), 3), 200))
    assert first == list(islice(planned(Suite(), 3), 200))
    assert first != list(islice(planned(Suite(), 4), 200))
    met = Counter((fault.kind, fault.service) for fault in first)
    assert met.keys() == {(kind, name) for kind in KINDS for name in (ENGINES if kind == KILL_ENGINE else NAMES)}


def test_each_is_told_played_and_counted_and_who_was_ended_is_started_again() -> None:
    suite = Suite()
    told: list[Fault] = []
    with Faults(suite, seed=0, told=told.append, every_s=0.001) as faults:
        # What is killed is away for seconds, of which the end of the block takes the last.
        suite.enough.wait(20.0)
    assert faults.failed is None
    assert sum(faults.done.values()) == len(told)
    ended = [name for what, name in suite.calls if what in ("kill", "stop")]
    assert [name for what, name in suite.calls if what == "start"] == ended
    assert told == list(islice(planned(Suite(), 0), len(told)))


def test_a_service_that_does_not_come_back_ends_the_faults_and_is_said() -> None:
    suite = Suite(broken="all")
    with Faults(suite, seed=0, told=lambda fault: None, every_s=0.001) as faults:
        faults._thread.join(20.0)
    assert "has not come back" in str(faults.failed)
