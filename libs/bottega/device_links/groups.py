"""Process groups of two, which move the bytes of one direction of one link, and the link's ends that use them.

A group is created without torch.distributed's world, so a failure affects only its link. While it is set up, its ends
exchange values over the connection of that direction. Both ends have proved themselves on that connection, so no other
process can take part, unlike with stores that listen on their own port. A group lives as long as the link.

The sender enqueues its operation when the DATA frame is on its way, and the receiver when that frame has arrived, so a
device only waits for a peer that is there. If the peer dies in the middle, the connection of the frames reports it and
the group is aborted.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, Store

from bottega.device_links.ends import DeviceReceiver, DeviceSender, Inflow, pieces_of
from bottega.device_links.tensors import DeviceTensor, beside
from bottega.errors import BadFrame, DeadlineExceeded, LinkError, PeerDead
from bottega.transport import Deadline

# Without these settings, one failed link would end the whole process. With them, an operation that fails or times out
# ends only its group, nothing is dumped, and the watchdog itself is not monitored.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# Seconds for one piece. Links give up a peer much earlier; this bounds operations that no thread waits for.
_OPERATION_S = 60.0
# Seconds, shorter for Gloo, whose waits cannot be interrupted.
_GLOO_OPERATION_S = 15.0
_PAUSE_S = 5e-5
_NOW = Deadline(at=0.0)
# Lengths of a key and of its value.
_LENGTHS = struct.Struct("<HI")
# Addresses and identities of groups have some hundred bytes.
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 512, 1 << 20


class Transfer(Protocol):
    """A pending transfer of a piece of a message."""

    def done(self, deadline: Deadline) -> bool:
        """Wait until the piece was sent or received. Return False at the deadline. Raises PeerDead if it failed."""
        ...


class PairGroup(Protocol):
    """A group of two processes, one of which sends. Pieces arrive in order and have the same size at both ends."""

    def send(self, tensor: Tensor) -> Transfer:
        """Enqueue sending a flat tensor, after the work in the current stream. Raises PeerDead."""
        ...

    def receive(self, tensor: Tensor) -> Transfer:
        """Enqueue receiving into a flat tensor. Raises PeerDead."""
        ...

    def abort(self) -> None:
        """Release threads and the device that wait for the group. Any thread may call it, more than once."""
        ...


def failed(error: Exception) -> PeerDead:
    """Convert an error of a group to the link's error."""
    lines = str(error).splitlines() or [type(error).__name__]
    return PeerDead(f"the link between the devices failed: {lines[0][:200]}")


class GlooGroup:
    """A Gloo group, which moves host memory over its own, unauthenticated connections."""

    def __init__(self, store: Store, *, sends: bool, host: str, deadline: Deadline) -> None:
        """Connect from `host`, the address of this process. Raises RuntimeError, and the store's errors."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._threads = 1
        options._timeout = timedelta(seconds=max(deadline.left_s(), 0.1))
        self._group: Any = gloo(store, 0 if sends else 1, 2, options)
        self._other = 1 if sends else 0
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="link-gloo")

    def send(self, tensor: Tensor) -> Transfer:
        return self._begin("send", tensor)

    def receive(self, tensor: Tensor) -> Transfer:
        return self._begin("recv", tensor)

    def abort(self) -> None:
        # Its connections close with the last operation, at the latest at that operation's timeout.
        self._group = None
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _begin(self, name: str, tensor: Tensor) -> Transfer:
        group = self._group
        try:
            work = getattr(group, name)([tensor], self._other, 0)
            return _GlooTransfer(self._waiting.submit(work.wait, timedelta(seconds=_GLOO_OPERATION_S)))
        except (AttributeError, RuntimeError) as error:  # it was aborted, or its connections are gone
            raise failed(error) from error


class _GlooTransfer:
    """A transfer over Gloo. Only a waiting thread learns that it has ended, so a thread of the group waits."""

    def __init__(self, waiting: Future[object]) -> None:
        self._waiting = waiting

    def done(self, deadline: Deadline) -> bool:
        try:
            self._waiting.result(timeout=deadline.left_s())
        except TimeoutError:
            return False
        except RuntimeError as error:
            raise failed(error) from error
        return True


class NcclGroup:
    """An NCCL group, which moves bytes between the memories of two devices."""

    def __init__(self, store: Store, *, sends: bool, device: torch.device, deadline: Deadline) -> None:
        """Connect to the other end. Raises RuntimeError, and the store's errors."""
        for name, value in _NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=_OPERATION_S)
        self._device = device
        self._other = 1 if sends else 0
        self._aborted = threading.Event()
        self._group: Any = nccl(store, 0 if sends else 1, 2, options)
        self._group.eager_connect_single_device(device)

    def send(self, tensor: Tensor) -> Transfer:
        return self._begin("send", tensor)

    def receive(self, tensor: Tensor) -> Transfer:
        return self._begin("recv", tensor)

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            # It waits for the device, where an operation may be stuck. The thread that ends the link does not wait.
            threading.Thread(target=self._group.abort, name="link-abort", daemon=True).start()

    def check(self) -> None:
        """Raise PeerDead if the group has failed or was aborted, because received bytes are then invalid."""
        if self._aborted.is_set():
            raise PeerDead("the link between the devices was ended")
        if self._group.get_error() != ErrorType.SUCCESS:
            raise PeerDead("the link between the devices failed: NCCL lost the other end")

    def _begin(self, name: str, tensor: Tensor) -> Transfer:
        self.check()
        try:
            with beside(self._device):
                return _NcclTransfer(self, getattr(self._group, name)([tensor], self._other, 0))
        except RuntimeError as error:
            raise failed(error) from error


class _NcclTransfer:
    def __init__(self, group: NcclGroup, work: Any) -> None:
        self._group = group
        self._work = work

    def done(self, deadline: Deadline) -> bool:
        pause = threading.Event()
        while not self._work.is_completed():
            self._group.check()
            if deadline.left_s() == 0:
                return False
            pause.wait(_PAUSE_S)
        self._group.check()  # an interrupted operation counts as completed, too
        return True


class GroupSender(DeviceSender):
    """The sender of one direction over a process group."""

    def __init__(self, connection: socket.socket, device: torch.device, group: PairGroup) -> None:
        super().__init__(connection, device)
        self._group = group
        self._under_way: list[Transfer] = []

    def move(self, piece: DeviceTensor) -> None:
        self._under_way = [transfer for transfer in self._under_way if not transfer.done(_NOW)]
        with beside(self.device, piece.written):
            self._under_way += [self._group.send(part) for part in pieces_of(piece.tensor)]

    def shut_down(self, cause: LinkError) -> None:
        super().shut_down(cause)
        self._group.abort()

    def close(self) -> None:
        super().close()
        self._group.abort()
        self._under_way.clear()


class GroupReceiver(DeviceReceiver):
    """The receiver of one direction over a process group."""

    def __init__(self, connection: socket.socket, device: torch.device, group: PairGroup) -> None:
        super().__init__(connection, device)
        self._group = group

    def begin(self, index: int, target: Tensor, start: int) -> Inflow:
        return self._group.receive(target)

    def shut_down(self, cause: LinkError) -> None:
        super().shut_down(cause)
        self._group.abort()

    def close(self) -> None:
        super().close()
        self._group.abort()


class LinkStore(Store):
    """A torch.distributed store for two processes. Every call ends by the deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        super().__init__()
        self._connection: socket.socket | None = connection
        self._deadline = deadline
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value for both processes. Raises OSError, DeadlineExceeded."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._connection is not None:
            self._limit(self._connection)
            name = key.encode()
            self._connection.sendall(_LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Return a value, once the other process has set it. Raises PeerDead, DeadlineExceeded, BadFrame."""
        while key not in self._values:
            self._receive()
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises the errors of `get`."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return all(key in self._values for key in keys)

    def close(self) -> None:
        """End the set-up. From now on the connection carries frames, and no further keys are set."""
        self._connection = None

    def _receive(self) -> None:
        connection = self._connection
        if connection is None:
            raise PeerDead("a process group reads a key that was not set during its set-up")
        key_bytes, value_bytes = _LENGTHS.unpack(self._read(connection, _LENGTHS.size))
        if key_bytes > _MAX_KEY_BYTES or value_bytes > _MAX_VALUE_BYTES:
            raise BadFrame("the peer sent a longer key or value than any process group sets")
        key = self._read(connection, key_bytes)
        self._values[key.decode(errors="replace")] = self._read(connection, value_bytes)

    def _read(self, connection: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit(connection)
            got = connection.recv(count - len(data))
            if not got:
                raise PeerDead("the process at the other end left while the devices were linked")
            data += got
        return data

    def _limit(self, connection: socket.socket) -> None:
        left_s = self._deadline.left_s()
        if left_s == 0:
            raise DeadlineExceeded("the other end did not link its device in time")
        connection.settimeout(left_s)
