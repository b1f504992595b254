"""How a server's engine process begins on its device."""

from __future__ import annotations

import socket

import pytest
import torch

from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.engine_loop import run
from bottega.process import FramedPipe


class ChosenError(Exception):
    """Of a stand-in for torch.cuda.set_device: nothing behind it runs without a GPU."""


def test_the_device_of_the_engine_is_the_current_one_before_anything_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_device(device: torch.device) -> None:
        raise ChosenError(str(device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ChosenError, match="cuda:1"):
        run(FramedPipe(ours), ControlNetEngineConfig(device="cuda:1"))
    ours.close()
