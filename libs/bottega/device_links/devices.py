"""The device of a process as its links see it: its endpoint in offers, which backends fit a peer, and their set-up."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from typing import Literal

import torch
import torch.distributed as dist

from bottega.device_links.ends import DeviceReceiver, DeviceSender, SlotBudget
from bottega.device_links.groups import GlooGroup, GroupReceiver, GroupSender, LinkStore, NcclGroup, PairGroup, failed
from bottega.device_links.shared_memory import CudaMemory, PoolReceiver, PoolSender, SharedMemory
from bottega.errors import DeadlineExceeded, LinkError
from bottega.transport import Backend, Deadline, DeviceEndpoint, ProvenConnections
from bottega.transport.handshake.messages import host_identity

_log = logging.getLogger(__name__)

Setting = Literal["auto", "off", "gloo"]
"""How links move tensors between devices: by the devices' own backends ("auto"), not at all ("off"), or by Gloo.

Gloo moves host memory. It is for tests, and for networks where nothing else works.
"""

Ends = tuple[DeviceSender, DeviceReceiver]
Opener = Callable[[ProvenConnections, Deadline], Ends]

# Seconds for which a backend is not tried again after it failed with a listener's device.
_AGAIN_S = 600.0
# Maximum number of remembered failures.
_MAX_FAILURES = 256
_LOOPBACK = "127.0.0.1"


def device_links(setting: Setting, device: torch.device, *, budget: SlotBudget | None = None) -> Devices | None:
    """Return the object that lets links use this device, or None if links use only host memory.

    Args:
        budget: Account for the slots in device memory; None counts nothing.
    """
    if setting == "gloo":
        return Devices("memory of the host", {Backend.GLOO: open_gloo})  # its slots are not device memory
    if setting == "off" or device.type != "cuda":
        return None
    openers: dict[Backend, Opener] = {}
    try:
        openers[Backend.CUDA_IPC] = pool_opener(CudaMemory(device))
    except OSError as error:
        _log.warning("memory of the device is not shared with other processes", extra={"why": str(error)})
    if dist.is_available() and dist.is_nccl_available():
        openers[Backend.NCCL] = lambda connections, deadline: _open_nccl(device, connections, deadline)
    return Devices(f"GPU {torch.cuda.get_device_properties(device).uuid}", openers, budget=budget)


class Devices:
    """The DeviceLinks of a process (see bottega.transport).

    Args:
        device: Identity of the device, the same in all processes.
        openers: How each supported backend opens a link.
        budget: Account for the slots of all links; None counts nothing.
    """

    def __init__(self, device: str, openers: Mapping[Backend, Opener], *, budget: SlotBudget | None = None) -> None:
        self._budget = budget
        self.endpoint = DeviceEndpoint(
            host=host_identity(), device=device, version=_version(), backends=tuple(b for b in Backend if b in openers)
        )
        self._openers = openers
        self._failures: dict[tuple[Backend, DeviceEndpoint], tuple[float, str]] = {}
        self._lock = threading.Lock()

    def misfit(self, backend: Backend, listener: DeviceEndpoint) -> str:
        """Return why a backend cannot be used for a link to a listener, or "" if it can."""
        here = self.endpoint
        if backend not in here.backends or backend not in listener.backends:
            return f"{'this end' if backend not in here.backends else 'the listener'} has none"
        if backend is not Backend.CUDA_IPC and here.version != listener.version:
            return f"the listener has {listener.version}, and this end {here.version}"
        if backend is Backend.CUDA_IPC and here.host != listener.host:
            return "the listener is on another host"
        if backend is Backend.NCCL and (here.host, here.device) == (listener.host, listener.device):
            return "both ends are on one device"
        return self._failure(backend, listener)

    def open(self, backend: Backend, connections: ProvenConnections, deadline: Deadline) -> Ends:
        """Set up both directions of a link, while the other end does the same.

        The set-up runs in a thread of its own and is abandoned at the deadline, because NCCL's calls have none. Raises
        LinkError with the reason; the connections are closed then.
        """
        ends: Future[Ends] = Future()
        threading.Thread(
            target=self._set_up, args=(backend, connections, deadline, ends), name="link-devices", daemon=True
        ).start()
        try:
            return self._await(backend, ends, deadline)
        except LinkError:
            _close(connections)
            raise

    def _set_up(self, backend: Backend, connections: ProvenConnections, deadline: Deadline, ends: Future[Ends]) -> None:
        made: Ends | LinkError
        try:
            made = self._openers[backend](connections, deadline)
            if self._budget is not None:
                for end in made:
                    end.slots.count_in(self._budget)
        except LinkError as error:
            made = error
        except Exception as error:  # noqa: BLE001 - libraries raise their own errors here; only this link fails
            made = failed(error)
        waited_for = ends.set_running_or_notify_cancel()
        if isinstance(made, LinkError):
            if waited_for:
                ends.set_exception(made)
        elif waited_for:
            ends.set_result(made)
        else:
            for end in made:
                end.shut_down(DeadlineExceeded("the devices were linked too late"))
                end.close()

    @staticmethod
    def _await(backend: Backend, ends: Future[Ends], deadline: Deadline) -> Ends:
        try:
            return ends.result(timeout=deadline.left_s())
        except TimeoutError as error:
            if ends.cancel():
                raise DeadlineExceeded(f"{backend} did not link the devices in time") from error
            return ends.result()  # it finished at the last moment

    def remember_failure(self, backend: Backend, listener: DeviceEndpoint, why: str) -> None:
        """Remember that opening a link failed. `misfit` reports it for a while."""
        _log.warning("two devices could not be linked", extra={"backend": backend, "why": why})
        with self._lock:
            if len(self._failures) >= _MAX_FAILURES:
                del self._failures[next(iter(self._failures))]
            self._failures[backend, listener] = time.monotonic(), why

    def _failure(self, backend: Backend, listener: DeviceEndpoint) -> str:
        with self._lock:
            when_s, why = self._failures.get((backend, listener), (0.0, ""))
            if why and time.monotonic() - when_s > _AGAIN_S:
                del self._failures[backend, listener]
                why = ""
        return f"it failed before: {why}" if why else ""


def pool_opener(memory: SharedMemory) -> Opener:
    """Return a function that opens links through memory that two processes on a host share."""

    def open_pool(connections: ProvenConnections, deadline: Deadline) -> Ends:
        sender = PoolSender(connections.sending, memory)
        return sender, PoolReceiver(connections.receiving, memory, connections.limits)

    return open_pool


def open_gloo(connections: ProvenConnections, deadline: Deadline) -> Ends:
    """Open a link over Gloo, in host memory."""
    host = _LOOPBACK
    if connections.sending.family != socket.AF_UNIX:
        host = connections.sending.getsockname()[0]
    return _open_groups(
        connections,
        torch.device("cpu"),
        deadline,
        lambda store, sends: GlooGroup(store, sends=sends, host=host, deadline=deadline),
    )


def _open_nccl(device: torch.device, connections: ProvenConnections, deadline: Deadline) -> Ends:
    return _open_groups(
        connections,
        device,
        deadline,
        lambda store, sends: NcclGroup(store, sends=sends, device=device, deadline=deadline),
    )


def _open_groups(
    connections: ProvenConnections,
    device: torch.device,
    deadline: Deadline,
    new_group: Callable[[LinkStore, bool], PairGroup],
) -> Ends:
    """Return the sender and receiver of a link. Each direction has a group; both ends create them in the same order."""
    groups: dict[bool, PairGroup] = {}
    try:
        for sends in (connections.connecting, not connections.connecting):
            store = LinkStore(connections.sending if sends else connections.receiving, deadline)
            groups[sends] = new_group(store, sends)
            store.close()
    except BaseException:
        for group in groups.values():
            group.abort()
        raise
    return (
        GroupSender(connections.sending, device, groups[True]),
        GroupReceiver(connections.receiving, device, groups[False]),
    )


def _close(connections: ProvenConnections) -> None:
    """Shut the connections down, which wakes their readers, and close them."""
    for connection in (connections.sending, connections.receiving):
        with suppress(OSError):  # it has ended already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _version() -> str:
    """Return the versions that must be equal at both ends of a process group."""
    text = f"torch {torch.__version__.partition('+')[0]}"
    if torch.version.cuda and dist.is_available() and dist.is_nccl_available():
        text += f" NCCL {'.'.join(str(part) for part in torch.cuda.nccl.version())}"  # type: ignore[no-untyped-call]
    return text
