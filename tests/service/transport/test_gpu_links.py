"""Links between GPUs on GPUs: tensors of another process come unchanged, a peer's death is noticed, memory comes back.

The conformance tests have the same promises with memory of the host in place of a GPU's, and Gloo in place of NCCL.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine.messages import residuals_layout
from bottega.device.memory_plan import MemoryPlan
from bottega.device_links.devices import device_links
from bottega.errors import PeerDead
from bottega.transport import Backend, Deadline, Layout, Link
from tests.support.gpu_peer import LIMITS, gpu_peer, receive, send
from tests.support.transport_backends import listening
from tests.support.waiting import wait_until

pytestmark = pytest.mark.gpu

HERE = torch.device("cuda:0")
# A small message, and one as large as half of SDXL's residuals at 1024x1024: slots grow between them.
SMALL = residuals_layout(2, ((320, 8, 8), (1280, 4, 4)), torch.float16)
LARGE = residuals_layout(2, ((320, 128, 128), (640, 64, 64), (1280, 32, 32)), torch.float16)


@pytest.fixture(params=["ipc on one device", "ipc", "nccl"])
def way(request: pytest.FixtureRequest) -> tuple[Backend, str]:
    """A backend, and the device of the other process."""
    if request.param == "ipc on one device":
        return Backend.CUDA_IPC, "cuda:0"
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU, and both ends want one of their own")
    return (Backend.CUDA_IPC if request.param == "ipc" else Backend.NCCL), "cuda:1"


@contextlib.contextmanager
def _linked(
    folder: Path, role: str, way: tuple[Backend, str], plan: MemoryPlan | None = None
) -> Iterator[tuple[Link, subprocess.Popen[bytes]]]:
    devices = device_links("auto", HERE, budget=plan)
    with listening(folder, limits=LIMITS, devices=devices) as listener:
        offer = listener.offer()
        with gpu_peer(role, way[1], way[0], offer) as process, listener.accept(offer, Deadline.after(60.0)) as link:
            assert link.backend_choice.backend == way[0], link.backend_choice.reason
            yield link, process


def _tensors(layout: Layout, seed: int) -> list[torch.Tensor]:
    chance = torch.Generator(HERE).manual_seed(seed)
    shapes = [spec.shape for spec in layout.specs[1:]]
    return [torch.randn(shape, generator=chance, device=HERE).half() for shape in shapes]


def test_tensors_come_back_from_another_process_unchanged(tmp_path: Path, way: tuple[Backend, str]) -> None:
    with _linked(tmp_path, "echo", way) as (link, _):
        for seed in range(12):
            layout = (SMALL, LARGE)[seed % 3 == 2]
            tensors = _tensors(layout, seed)
            send(link, layout, tensors)
            back = receive(link, layout)
            assert all(tensor.device == HERE for tensor in back)
            assert all(map(torch.equal, tensors, back))


def test_a_message_may_be_enqueued_before_its_tensors_are_computed(tmp_path: Path, way: tuple[Backend, str]) -> None:
    with _linked(tmp_path, "echo", way) as (link, _):
        busy = torch.randn(4096, 4096, device=HERE)
        for seed in range(4):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            tensors = [tensor + busy[0, 0].half() for tensor in _tensors(LARGE, seed)]
            send(link, LARGE, tensors)
            assert all(map(torch.equal, tensors, receive(link, LARGE)))


def test_a_killed_peer_is_noticed_and_all_memory_comes_back(tmp_path: Path, way: tuple[Backend, str]) -> None:
    torch.cuda.synchronize(HERE)
    plan, before = MemoryPlan(8 << 30), torch.cuda.memory_allocated(HERE)
    for _ in range(3):
        with _linked(tmp_path, "hold", way, plan) as (link, peer):
            send(link, LARGE, _tensors(LARGE, 1))
            assert plan.reserved["links"] >= LARGE.size_bytes
            time.sleep(0.2)
            peer.kill()
            with pytest.raises(PeerDead):
                link.recv(Deadline.after(30.0))
        assert plan.reserved["links"] == 0
    wait_until(lambda: torch.cuda.memory_allocated(HERE) <= before, "the memory of the links")
