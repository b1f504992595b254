"""What a configuration may call a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.config import parse
from bottega.controlnet.config import ControlNetConfig
from bottega.device_names import check_device_name
from bottega.errors import ConfigError
from bottega.worker.config import WorkerConfig


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_names_that_are_served(name: str) -> None:
    assert check_device_name(name) == name


@pytest.mark.parametrize("kind", [WorkerConfig, ControlNetConfig])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mps", r"Apple's GPUs \(mps\) are not served; use cpu, or cuda:N"),
        ("xpu:1", r"Intel's GPUs \(xpu\) are not served"),
        ("gpu", "no device is called 'gpu'; use auto, cpu, cuda or cuda:N"),
        ("cuda:", "no device is called 'cuda:'"),
    ],
)
def test_others_are_refused_with_a_sentence_by_worker_and_controlnet_server(kind: type, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.device: .*{why}"):
        parse(kind, {"engine": {"device": name}}, source=str(Path("worker.yaml")))
