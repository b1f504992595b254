"""What links between devices promise beyond the others: headers apart, a proof before they are used, credit when the
device is done. Memory of the host stands for that of a device; its parts are shown as a device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine.messages import (
    ControlStep,
    StepEntry,
    read_residuals_head,
    read_step,
    residuals_layout,
    step_message,
)
from bottega.device.memory_plan import MemoryPlan
from bottega.device_links import ends, tensors
from bottega.device_links.devices import Devices, Ends, open_gloo, pool_opener
from bottega.device_links.ends import Inflow
from bottega.device_links.tensor_messages import tensor_at
from bottega.device_links.tensors import DeviceTensor
from bottega.errors import AuthFailed, LinkError, NoCredit, NoSharedMemory, PeerDead
from bottega.model.rows import Half
from bottega.transport import (
    Backend,
    Deadline,
    DType,
    Incoming,
    Layout,
    Limits,
    Link,
    ProvenConnections,
    TensorSpec,
    WholeMessage,
    connect,
)
from tests.support.host_devices import HostMemory
from tests.support.transport_backends import LAYOUT, check_message, content, linked, listening, patience, soon, write
from tests.support.waiting import wait_until

WAYS = (Backend.CUDA_IPC, Backend.GLOO)
LIMITS = Limits(slots=2, slot_bytes=1 << 20)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are shown as a GPU's are: nothing but a header is in memory of the host."""
    monkeypatch.setattr(tensors, "part_of", DeviceTensor)


@pytest.fixture(params=WAYS, ids=str)
def link_ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Link, Link]]:
    with linked(request.param, tmp_path, limits=LIMITS) as both:
        yield both


def _passed(link_ends: tuple[Link, Link], message: WholeMessage) -> Incoming:
    near, far = link_ends
    near.send(message.layout, message.buffers, patience())
    incoming = far.recv(patience(), message.layout)
    incoming.wait_all(patience())
    return incoming


def _parts(incoming: Incoming) -> list[memoryview]:
    return [incoming.part(index) for index in range(len(incoming.layout.specs))]  # type: ignore[misc]


@pytest.mark.usefixtures("on_device")
def test_headers_are_in_memory_of_the_host_and_the_rest_on_the_device(link_ends: tuple[Link, Link]) -> None:
    step = ControlStep(
        number=7,
        entries=(StepEntry(session=1, half=Half.CONDITIONAL, sample=0),),
        samples=torch.randn(1, 4, 8, 8),
        timesteps=torch.tensor([500.0]),
    )
    with _passed(link_ends, step_message(step)) as incoming:
        assert isinstance(incoming.part(1), memoryview)
        assert isinstance(incoming.part(2), DeviceTensor)
        with pytest.raises(ValueError, match="device memory"):
            incoming.view(2)
        read = read_step(incoming.layout, _parts(incoming))
        assert (read.number, read.entries) == (step.number, step.entries)
        assert torch.equal(read.samples, step.samples)


@pytest.mark.usefixtures("on_device")
def test_residuals_are_written_into_slots_of_the_device_point_by_point(link_ends: tuple[Link, Link]) -> None:
    near, far = link_ends
    layout = residuals_layout(2, ((4, 8, 8), (8, 4, 4)), torch.float16)
    sent = [torch.randn(spec.shape).half() for spec in layout.specs[1:]]
    with near.start_message(layout, patience()) as outgoing:
        tensor_at(layout, outgoing.parts, 0).copy_(torch.tensor([11, 1]))
        for index, tensor in enumerate(sent, start=1):
            tensor_at(layout, outgoing.parts, index).copy_(tensor)
            outgoing.ready(index + 1)
    with far.recv(patience(), layout) as incoming:
        incoming.wait_all(patience())
        assert read_residuals_head(layout, incoming.part(0)) == (11, True)
        for index, tensor in enumerate(sent, start=1):
            assert torch.equal(tensor_at(layout, _parts(incoming), index), tensor)


def _corrupt(connections: ProvenConnections, deadline: Deadline) -> Ends:
    made = pool_opener(HostMemory())(connections, deadline)
    begin = made[1].begin

    def begin_wrong(index: int, target: torch.Tensor, start: int) -> Inflow:
        inflow = begin(index, target, start)
        target[0] += 1
        return inflow

    made[1].begin = begin_wrong  # type: ignore[method-assign]
    return made


def _refuse(connections: ProvenConnections, deadline: Deadline) -> Ends:
    raise PeerDead("these two cannot")


def _fail(connections: ProvenConnections, deadline: Deadline) -> Ends:
    raise RuntimeError("an error of a library")


def _hang(connections: ProvenConnections, deadline: Deadline) -> Ends:
    time.sleep(0.6)
    raise PeerDead("too late")


@pytest.mark.parametrize(
    ("opener", "why"),
    [(_corrupt, "differ from the sent bytes"), (_refuse, "these two cannot"), (_fail, "an error of a library")],
)
def test_devices_that_cannot_be_linked_are_found_out_and_the_next_backend_is_taken(
    tmp_path: Path, opener: Callable[[ProvenConnections, Deadline], Ends], why: str
) -> None:
    here, there = Devices("a", {Backend.CUDA_IPC: opener}), Devices("b", {Backend.CUDA_IPC: opener})
    with listening(tmp_path, devices=there) as listener, ThreadPoolExecutor(1) as pool:
        offer = listener.offer()
        accepting = pool.submit(listener.accept, offer, patience())
        with pytest.raises(AuthFailed, match="could not be linked by cuda-ipc"):
            connect(offer, patience(), devices=here)
        with pytest.raises(LinkError):
            accepting.result()
        again = listener.offer(offer.link_id)
        with connect(again, patience(), devices=here) as near, listener.accept(again, patience()) as far:
            assert near.backend_choice.backend == Backend.MEMFD
            assert "cuda-ipc: it failed before" in near.backend_choice.reason
            assert why in near.backend_choice.reason
            check_message(near, far)


def test_a_set_up_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.transport.link._SET_UP_S", 0.2)
    here = Devices("a", {Backend.GLOO: open_gloo})
    there = Devices("b", {Backend.GLOO: _hang})
    with listening(tmp_path, devices=there) as listener, ThreadPoolExecutor(1) as pool:
        offer = listener.offer()
        accepting = pool.submit(listener.accept, offer, patience())
        began = time.monotonic()
        with pytest.raises(AuthFailed):
            connect(offer, patience(), devices=here)
        with pytest.raises(LinkError):
            accepting.result()
        assert time.monotonic() - began < 3


class _Moment:
    """An event of a device that is behind."""

    def __init__(self) -> None:
        self.come = False

    def query(self) -> bool:
        return self.come


def test_credit_is_given_when_the_device_has_read_the_message(
    link_ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = link_ends
    for seed in range(2):
        write(near, LAYOUT, content(LAYOUT, seed))
    incoming = far.recv(patience(), LAYOUT)
    incoming.wait_all(patience())
    moment = _Moment()
    with monkeypatch.context() as patched:
        patched.setattr(ends, "mark", lambda device: moment)
        incoming.release()
    with pytest.raises(NoCredit):
        near.start_message(LAYOUT, soon())
    moment.come = True
    write(near, LAYOUT, content(LAYOUT, 2))


def test_exported_memory_is_freed_when_it_is_mapped_no_more(tmp_path: Path) -> None:
    ours, theirs = HostMemory(), HostMemory()
    here = Devices("a", {Backend.CUDA_IPC: pool_opener(ours)})
    there = Devices("b", {Backend.CUDA_IPC: pool_opener(theirs)})
    with listening(tmp_path, devices=there) as listener, ThreadPoolExecutor(1) as pool:
        offer = listener.offer()
        accepting = pool.submit(listener.accept, offer, patience())
        near = connect(offer, patience(), devices=here)
        far = accepting.result()
        check_message(near, far)
        assert ours.exported > 0
        assert theirs.mapped > 0
        near.close()
        time.sleep(0.05)
        assert ours.exported > 0, "the other end still has it mapped"
        far.close()
        wait_until(lambda: (ours.exported, ours.mapped, theirs.exported, theirs.mapped) == (0, 0, 0, 0), "all is freed")


def test_devices_of_other_versions_or_one_device_are_told_apart() -> None:
    openers = {Backend.CUDA_IPC: _refuse, Backend.NCCL: _refuse}
    one = Devices("GPU 1", openers)
    assert one.misfit(Backend.NCCL, Devices("GPU 1", openers).endpoint) == "both ends are on one device"
    assert one.misfit(Backend.NCCL, Devices("GPU 2", openers).endpoint) == ""
    assert one.misfit(Backend.CUDA_IPC, Devices("GPU 1", openers).endpoint) == ""
    assert "has none" in one.misfit(Backend.GLOO, one.endpoint)


def test_slots_of_links_have_their_place_in_the_budget_of_the_device(tmp_path: Path) -> None:
    budget_bytes = 64 << 20
    plan, opener = MemoryPlan(budget_bytes), {Backend.CUDA_IPC: pool_opener(HostMemory())}
    here = Devices("a", opener, budget=plan)
    with listening(tmp_path, devices=Devices("b", opener)) as listener, ThreadPoolExecutor(1) as pool:
        offer = listener.offer()
        accepting = pool.submit(listener.accept, offer, patience())
        with connect(offer, patience(), devices=here) as near, accepting.result() as far:
            check_message(near, far)
            held = plan.reserved["links"]
            assert LAYOUT.size_bytes <= held < budget_bytes
            plan.reserve("model", budget_bytes - held)
            large = Layout.of(TensorSpec(name="large", dtype=DType.UINT8, shape=(2 * LAYOUT.size_bytes,)))
            with pytest.raises(NoSharedMemory, match="it is taken by models"):
                near.start_message(large, patience())
            plan.release("model")
            near.start_message(large, patience())
            assert plan.reserved["links"] > held
    assert plan.reserved["links"] == 0
