"""Process groups of two, which move the bytes of one direction of one link.

They are created without torch.distributed's world, so a failure affects only the link of its group.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, Store

from bottega.device_links.streams import beside
from bottega.errors import PeerDead
from bottega.transport import Deadline

# Without these settings, one failed link would end the whole process. With them, an operation that fails or times out
# ends only its group, nothing is dumped, and the watchdog itself is not monitored.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# Timeout of one piece. Links give up a peer much earlier; this bounds operations that no thread waits for any more.
_OPERATION_S = 60.0
# Shorter for Gloo, whose waits cannot be interrupted.
_GLOO_OPERATION_S = 15.0
_PAUSE_S = 5e-5


class Transfer(Protocol):
    """A piece of a message on its way."""

    def done(self, deadline: Deadline) -> bool:
        """Wait until the piece has arrived or left; return False at the deadline. Raises PeerDead if it never will."""
        ...


class PairGroup(Protocol):
    """A group of two processes of which one sends. Pieces arrive in order and have the same size at both ends."""

    def send(self, tensor: Tensor) -> Transfer:
        """Enqueue sending flat bytes after the current stream. Raises PeerDead."""
        ...

    def receive(self, tensor: Tensor) -> Transfer:
        """Enqueue receiving flat bytes. Raises PeerDead."""
        ...

    def abort(self) -> None:
        """Free waiting threads and the device. Any thread may call it, more than once."""
        ...


def failed(error: Exception) -> PeerDead:
    """Return the link's error for an error of a group."""
    lines = str(error).splitlines() or [type(error).__name__]
    return PeerDead(f"the link between the devices failed: {lines[0][:200]}")


class GlooGroup:
    """A Gloo group, which moves host memory over its own, unauthenticated connections."""

    def __init__(self, store: Store, *, sends: bool, host: str, deadline: Deadline) -> None:
        """Connect from `host`, this end's address. Raises RuntimeError, and the store's errors."""
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
    """A transfer over Gloo, which reports an end only to a waiting thread: a thread of the group waits."""

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
        """Raise PeerDead if the group has failed or was aborted. Received bytes are void then."""
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
