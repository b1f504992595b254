"""How often the engine of a worker beats while it has nothing to do, by a clock that the test turns."""

from __future__ import annotations

import queue
import socket
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest

from bottega.device.heartbeat import Heartbeat
from bottega.engine.limits import EngineLimits
from bottega.model.model import Model
from bottega.process.child import FramedPipe
from bottega.transport import LinkCounters
from bottega.worker.config import EngineConfig
from bottega.worker.engine import loop as engine_loop
from bottega.worker.engine.runtime import LinkRequests, Runtime
from tests.fakes.fake_time import FakeTime
from tests.support.engines import make_engine
from tests.support.model_fixture import model  # noqa: F401 - a fixture

NEWS_S, END_S = 60.0, 90.0
QUIET_S = 5.0


class EndedError(Exception):
    """The end of the test's time."""


def test_an_idle_engine_seldom_beats_without_news_and_at_once_with_some(
    model: Model,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = FakeTime(now=0.0)
    runtime = Runtime(
        config=EngineConfig(),
        engine=make_engine(model, EngineLimits()),
        counters=LinkCounters(),
        heartbeat=Heartbeat(),
    )
    pauses: list[tuple[float, float]] = []

    class NoCommands(queue.SimpleQueue[object]):
        """A queue to which nothing comes."""

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            assert block
            assert timeout is not None
            pauses.append((time.now, timeout))
            if time.now < NEWS_S <= time.now + timeout:
                runtime.engine.step_times.observe((16, 16), 1, 0.5)
            time.now += timeout
            if time.now > END_S:
                raise EndedError
            raise queue.Empty

    monkeypatch.setattr(engine_loop, "queue", SimpleNamespace(SimpleQueue=NoCommands, Empty=queue.Empty))
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=time.monotonic))
    monkeypatch.setattr(engine_loop, "os", SimpleNamespace(_exit=lambda _: None))
    ours, theirs = socket.socketpair()
    with ours:
        channel = FramedPipe(ours)
        beats: list[float] = []
        monkeypatch.setattr(channel, "send", lambda _: beats.append(time.now))
        with theirs, pytest.raises(EndedError):
            engine_loop.WorkerEngineLoop(channel, runtime, LinkRequests(lambda _: None), max_quiet_s=QUIET_S).run()
        for thread in threading.enumerate():
            if thread.name == "commands":
                thread.join()  # before the process's real _exit is back
    (news,) = [at_s for at_s in beats if NEWS_S <= at_s < NEWS_S + QUIET_S]
    others = [after - before for before, after in pairwise(beats) if after != news]
    assert others
    assert all(QUIET_S <= pause_s <= QUIET_S + 2.0 for pause_s in others)
    pause_at = dict(pauses)
    assert pauses[0] == (0.0, 0.5)
    assert {pause_s for at_s, pause_s in pauses if 15.0 < at_s < NEWS_S} == {2.0}
    assert pause_at[news] == 0.5, "it is awake again"
