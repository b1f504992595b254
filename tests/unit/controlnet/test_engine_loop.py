"""How a server's engine process begins on its device."""

from __future__ import annotations

import socket

import pytest
import torch

from bottega.controlnet import engine_loop
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.process import FramedPipe
from bottega.rpc.server_config import DeviceLinksConfig
from tests.support.memory_device import MemoryDevice

MIB = 1 << 20


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
