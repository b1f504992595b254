"""A device for links on a machine without one: memory of the host in place of a GPU's, and Gloo in place of NCCL."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from bottega.device_links.devices import Devices, open_gloo, pool_opener
from bottega.device_links.shared_memory import HANDLE_BYTES, Exported, Mapped
from bottega.errors import BadFrame
from bottega.transport import Backend

_CPU = torch.device("cpu")


def host_devices() -> Devices:
    """The device of a process that has both backends."""
    return Devices("host", {Backend.CUDA_IPC: pool_opener(HostMemory()), Backend.GLOO: open_gloo})


class HostMemory:
    """A SharedMemory whose handle is the path under which another process of this user finds it.

    exported, mapped: how many there are.
    """

    def __init__(self) -> None:
        self.device = _CPU
        self.exported = self.mapped = 0

    def export(self, size_bytes: int) -> Exported:
        return _HostExport(self, size_bytes)

    def map(self, handle: bytes, size_bytes: int) -> Mapped:
        return _HostMapping(self, handle, size_bytes)


class _HostExport:
    def __init__(self, owner: HostMemory, size_bytes: int) -> None:
        self._owner = owner
        self._descriptor = os.memfd_create("bottega-test-device", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size_bytes)
        self.memory: Tensor = torch.frombuffer(mmap.mmap(self._descriptor, size_bytes), dtype=torch.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._descriptor}".encode().ljust(HANDLE_BYTES, b"\0")
        owner.exported += 1

    def free(self) -> None:
        os.close(self._descriptor)
        self._owner.exported -= 1


class _HostMapping:
    def __init__(self, owner: HostMemory, handle: bytes, size_bytes: int) -> None:
        path = Path(handle.rstrip(b"\0").decode(errors="replace").replace("\0", "?"))
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < size_bytes:
                raise BadFrame(f"the peer announced a slot of {size_bytes} bytes and shared a smaller one")
            self._mapping = mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ)
        self._owner = owner
        owner.mapped += 1

    def copy_to(self, target: Tensor, start: int) -> None:
        target.copy_(torch.frombuffer(bytearray(self._mapping[start : start + target.nbytes]), dtype=torch.uint8))

    def unmap(self) -> None:
        self._mapping.close()
        self._owner.mapped -= 1
