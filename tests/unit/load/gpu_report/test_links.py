"""What the report says of the link to a ControlNet server: what carries it, and how long residuals are on it."""

from __future__ import annotations

from pathlib import Path

from load.gpu_report import links
from load.gpu_report.rig import FULL, Rig

GPU = Rig(size=FULL, device="cuda:0", folder=Path())
SERVING = {"event": "serving", "address": "127.0.0.1:1"}
BY_IPC = {"event": "linked to a ControlNet server", "service": "controlnet", "backend": "cuda-ipc", "why": "probed"}


def test_what_carries_the_link_is_read_from_the_workers_log() -> None:
    (figure,) = links.carried_by(GPU, [SERVING, BY_IPC, BY_IPC])
    assert (figure.name, figure.value) == ("controlnet_links_cuda-ipc", 2)
