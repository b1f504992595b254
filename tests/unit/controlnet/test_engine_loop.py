"""How a server's engine process begins on its device, and how seldom it reports at rest."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from bottega.controlnet import engine_loop
from bottega.controlnet.batch_executor import BatchExecutor
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.process.child import FramedPipe
from bottega.rpc.server_config import DeviceLinksConfig
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineEvent
from tests.support.memory_device import MemoryDevice

MIB = 1 << 20
HOUR_S = 3600.0


class ChosenError(Exception):
    """Of a stand-in for torch.cuda.set_device: nothing behind it runs without a GPU."""


def test_the_device_of_the_engine_is_the_current_one_before_anything_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_device(device: torch.device) -> None:
        raise ChosenError(str(device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ChosenError, match="cuda:1"):
        engine_loop.run(FramedPipe(ours), ControlNetEngineConfig(device="cuda:1"))
    ours.close()


def test_controlnets_leave_a_part_of_a_small_device_to_forwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = MemoryDevice((512 + 100) * MIB)  # of which the device's libraries have the first
    monkeypatch.setattr(engine_loop, "use_device", lambda _: device)
    ours, theirs = socket.socketpair()
    config = ControlNetEngineConfig(device="cpu", links=DeviceLinksConfig(listen="", socket=None))
    with theirs:
        loop = engine_loop.ControlNetEngineLoop(FramedPipe(ours), config, device.torch_device)
        # Its process would end with them.
        loop._links.close()
        loop._registry.cache.close()
    ours.close()
    (told,) = [record.__dict__ for record in caplog.records if record.__dict__.get("holder") == "ControlNets"]
    assert told["taken_mib"] == 75


class OverError(Exception):
    """The end of a loop that has none."""


@pytest.fixture
def channels() -> Iterator[tuple[FramedPipe, FramedPipe]]:
    """The pipe's ends of the engine and of its front."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FramedPipe(ours), FramedPipe(theirs)


def test_an_engine_at_rest_reports_rarely_and_a_command_wakes_it(
    monkeypatch: pytest.MonkeyPatch, channels: tuple[FramedPipe, FramedPipe]
) -> None:
    now_s, pauses = 0.0, []

    class Idle(BatchExecutor):
        """An executor to which no step comes within an hour."""

        def run_batch(self, timeout_s: float) -> None:
            nonlocal now_s
            now_s += timeout_s
            pauses.append(timeout_s)
            if now_s > HOUR_S:
                raise OverError

    monkeypatch.setattr(engine_loop, "BatchExecutor", Idle)
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(engine_loop, "os", SimpleNamespace(_exit=lambda _: None))
    config = ControlNetEngineConfig(device="cpu", links=DeviceLinksConfig(listen="", socket=None))
    engine, front = channels
    loop = engine_loop.ControlNetEngineLoop(engine, config, torch.device("cpu"), max_quiet_s=2.0)
    sent: list[str | None] = []
    monkeypatch.setattr(
        engine, "send", lambda frame: sent.append(ControlNetEngineEvent.FromString(frame).WhichOneof("event"))
    )
    with pytest.raises(OverError):
        loop.run()
    assert set(sent) == {"beat"}
    assert len(sent) < HOUR_S / 2 + 200
    assert max(pauses) == 2.0
    loop._stirred_s = now_s  # as a command does
    assert loop._pause_s == pauses[0] == 0.1
    front.close()
    for thread in threading.enumerate():
        if thread.name == "commands":
            thread.join()  # before the process's real _exit is back
    loop._registry.cache.close()
