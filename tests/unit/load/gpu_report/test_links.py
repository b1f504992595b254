"""What the report says of the link to a ControlNet server: what carries it, and how long residuals are on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from load.gpu_report import links
from load.gpu_report.rig import Rig
from load.gpu_report.size import FULL, SMALL_SIZE
from load.gpu_report.topology import SMALL

GPU = Rig(size=FULL, device="cuda:0", folder=Path())
SERVING = {"event": "serving", "address": "127.0.0.1:1"}
BY_IPC = {"event": "linked to a ControlNet server", "server": "controlnet", "backend": "cuda-ipc", "why": "probed"}
BY_FILE = {**BY_IPC, "backend": "memfd", "why": "the listener has none"}


def test_what_carries_the_link_is_read_from_the_workers_log() -> None:
    (figure,) = links.carried_by(GPU, [SERVING, BY_IPC, BY_IPC])
    assert (figure.name, figure.value) == ("controlnet_links_cuda-ipc", 2)


def test_on_a_gpu_another_link_than_one_through_its_memory_fails_the_part_and_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"is not cuda-ipc: memfd \(the listener has none\)"):
        list(links.carried_by(GPU, [BY_IPC, BY_FILE]))
    with pytest.raises(RuntimeError, match="never linked"):
        list(links.carried_by(GPU, [SERVING]))


def test_on_a_cpu_links_go_through_shared_memory_and_residuals_take_a_while(tmp_path: Path) -> None:
    rig = Rig(size=SMALL_SIZE, device="cpu", folder=tmp_path)
    (figure,) = links.carried_by(rig, [BY_FILE])
    assert figure.name == "controlnet_links_memfd"
    for part, config in (("unet", SMALL.unet), ("vae", SMALL.vae)):
        (rig.model / part).mkdir(parents=True)
        (rig.model / part / "config.json").write_text(json.dumps(config))
    taken = links.transfer(rig)
    assert taken.value > 0
    assert "memfd" in taken.label
