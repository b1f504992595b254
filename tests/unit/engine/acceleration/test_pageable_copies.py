"""Copies through pageable memory, on the class of CUDA devices, which are asked for nothing here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bottega.engine.acceleration.memory import PageableCopies
from bottega.model.model import Model
from tests.support.staged_device import StagedDevice


@pytest.fixture
def device() -> StagedDevice:
    return StagedDevice()


def test_copies_go_through_pinned_memory_but_while_it_is_enabled(model: Model, device: StagedDevice) -> None:
    there = replace(model, runtime=device)
    copies = PageableCopies()
    assert copies.unsupported(there) == ""
    host = torch.arange(5)
    staged = []
    steps: list[Callable[[], None]] = [lambda: None, lambda: copies.enable(there), copies.disable, copies.disable]
    for step in steps:
        step()
        before = device.staged
        assert torch.equal(device.to_device(host), host)
        staged.append(device.staged - before)
    assert staged == [1, 0, 1, 1]


def test_it_is_for_cuda_devices_alone(model: Model) -> None:
    assert "the model is on cpu" in PageableCopies().unsupported(model)
