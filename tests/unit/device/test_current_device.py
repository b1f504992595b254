"""The device that a model is loaded for is the current one: kernels of Triton are launched on no other."""

from __future__ import annotations

import pytest
import torch

from bottega.device.devices import pick_device, use_device
from bottega.miniature import WEIGHTS
from bottega.model.loading import load_model


class ChosenError(Exception):
    """Of a stand-in for torch.cuda.set_device: nothing behind it runs without a GPU."""


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_device(device: torch.device) -> None:
        raise ChosenError(str(device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_model_is_loaded_for_the_current_device_before_anything_is_on_it() -> None:
    with pytest.raises(ChosenError, match="cuda:1"):
        load_model(WEIGHTS, name="it", device=torch.device("cuda:1"), dtype=torch.float32)


def test_a_cpu_is_used_without_any_other_device() -> None:
    assert use_device(torch.device("cpu")).torch_device == torch.device("cpu")


@pytest.mark.parametrize(("name", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_gpu_that_is_picked_has_its_index(name: str, device: str) -> None:
    picked = pick_device(name)
    assert (str(picked), picked.index) == (device, int(device[-1]))
