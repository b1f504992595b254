"""Device memory that two processes on a host share: one allocates and exports it, the other maps it.

Exported memory must be freed only when no other process has it mapped; otherwise the other process's device would lose
it. The handle goes over a socket that the other process keeps open as long as it has the memory mapped, so that its end
or death is noticed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bottega.device_links.ends import no_memory
from bottega.errors import BadFrame

_log = logging.getLogger(__name__)

HANDLE_BYTES = 64
"""Bytes of a handle with which another process maps memory."""

# Seconds in which the peer of an ended link must unmap memory. What a stopped process holds is never freed.
_GIVE_UP_S = 60.0
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_BY_ADDRESS = 4  # cudaMemcpyDefault: derives the direction from the addresses


class Exported(Protocol):
    """Memory that another process may map with the handle. `memory` is a flat uint8 tensor."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def handle(self) -> bytes: ...

    def free(self) -> None:
        """Free the memory. Call it only when no process has it mapped."""
        ...


class Mapped(Protocol):
    """Memory of another process, mapped into this one."""

    def copy_to(self, target: Tensor, start: int) -> None:
        """Enqueue a copy of the bytes, from `start` on, into a flat tensor of this process, in the current stream."""
        ...

    def unmap(self) -> None:
        """Unmap the memory. Call it once, when no copy is running."""
        ...


class SharedMemory(Protocol):
    """A way to share device memory between processes."""

    @property
    def device(self) -> torch.device: ...

    def export(self, size_bytes: int) -> Exported:
        """Allocate memory to share. Raises NoSharedMemory."""
        ...

    def map(self, handle: bytes, size_bytes: int) -> Mapped:
        """Map another process's memory. Raises BadFrame if the handle is not valid for it."""
        ...


class Export:
    """Exported memory, with the sender's end of the socket whose other end the receiver holds."""

    def __init__(self, exported: Exported, held: socket.socket) -> None:
        self.memory = exported.memory
        self._exported = exported
        self.held = held

    @classmethod
    def of(cls, exported: Exported) -> tuple[Export, socket.socket]:
        """Create the export, and return it with the socket for the receiver. The handle waits in that socket."""
        here, there = socket.socketpair()
        here.sendall(exported.handle)
        return cls(exported, here), there

    @property
    def mapped(self) -> bool:
        """Whether the receiver has the memory mapped or may still map it."""
        poll = select.poll()
        poll.register(self.held, select.POLLRDHUP)
        return not poll.poll(0)

    def free(self) -> None:
        """Free the memory. Call it only when the receiver no longer has it mapped."""
        self._exported.free()
        self.held.close()


def free_when_unmapped(exports: Sequence[Export]) -> None:
    """Free exports in the background once their receivers unmap them, which takes long only for stopped receivers."""
    if exports:
        thread = threading.Thread(target=_free_all, args=(list(exports),), name="link-memory", daemon=True)
        thread.start()


def _free_all(exports: list[Export]) -> None:
    for export in exports:
        poll = select.poll()
        poll.register(export.held, select.POLLRDHUP)
        if poll.poll(_GIVE_UP_S * 1e3):
            export.free()
        else:
            facts = {"bytes": export.memory.nbytes, "seconds": _GIVE_UP_S}
            _log.warning("device memory cannot be freed, because another process still has it mapped", extra=facts)


class CudaMemory:
    """A SharedMemory over CUDA IPC, allocated outside of torch's allocator.

    An export exposes a whole allocation, and an allocation of torch contains more than one tensor.
    """

    def __init__(self, device: torch.device) -> None:
        """Load the CUDA runtime. Raises OSError if its library is missing."""
        self.device = device
        _runtime()

    def export(self, size_bytes: int) -> Exported:
        return _CudaExport(self.device, size_bytes)

    def map(self, handle: bytes, size_bytes: int) -> Mapped:
        return _CudaMapping(self.device, handle, size_bytes)


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _CudaExport:
    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device
        self._address = ctypes.c_void_p()
        handle = _Handle()
        with torch.cuda.device(device):
            status = _runtime().cudaMalloc(ctypes.byref(self._address), size_bytes)
            if status == _OUT_OF_MEMORY:
                raise no_memory(size_bytes)
            _check(status, "cudaMalloc")
            _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), self._address), "cudaIpcGetMemHandle")
            assert self._address.value is not None, "it was allocated"
            self.memory = torch.as_tensor(_CudaArray(self._address.value, size_bytes), device=device)
        self.handle = bytes(handle.reserved)

    def free(self) -> None:
        with torch.cuda.device(self._device):
            _check(_runtime().cudaFree(self._address), "cudaFree")


class _CudaMapping:
    def __init__(self, device: torch.device, handle: bytes, size_bytes: int) -> None:
        self._device = device
        self._address = ctypes.c_void_p()
        with torch.cuda.device(device):
            status = _runtime().cudaIpcOpenMemHandle(
                ctypes.byref(self._address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
            _check(status, "cudaIpcOpenMemHandle")
            self._check_size(size_bytes)

    def _check_size(self, size_bytes: int) -> None:
        """Raise BadFrame if the memory is too small: copying from beyond its end would break the device context."""
        base, found = ctypes.c_void_p(), ctypes.c_size_t()
        status = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(found), self._address)
        if status == 0 and found.value < size_bytes:
            self.unmap()
            raise BadFrame(f"the peer announced a slot of {size_bytes} bytes and shared one of {found.value}")

    def copy_to(self, target: Tensor, start: int) -> None:
        assert self._address.value is not None, "it is mapped"
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            status = _runtime().cudaMemcpyAsync(
                target.data_ptr(), self._address.value + start, target.nbytes, _BY_ADDRESS, stream
            )
        _check(status, "cudaMemcpyAsync")

    def unmap(self) -> None:
        with torch.cuda.device(self._device):
            _check(_runtime().cudaIpcCloseMemHandle(self._address), "cudaIpcCloseMemHandle")


class _CudaArray:
    """Memory that torch uses by address, through the CUDA array interface. torch does not free it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _check(status: int, call: str) -> None:
    """Raise BadFrame, which names the failed call. This ends the link, and another backend is tried."""
    if status:
        why = _runtime().cudaGetErrorString(status).decode(errors="replace")
        _runtime().cudaGetLastError()  # otherwise torch would raise it at its next call
        raise BadFrame(f"memory of the devices cannot be shared: {call}: {why}")


@functools.cache
def _runtime() -> Any:
    """Return the CUDA runtime that torch has loaded. Raises OSError."""
    major = (torch.version.cuda or "").partition(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaMalloc.argtypes = (ctypes.POINTER(pointer), size)
    runtime.cudaFree.argtypes = (pointer,)
    runtime.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), pointer)
    runtime.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
    runtime.cudaIpcCloseMemHandle.argtypes = (pointer,)
    runtime.cudaMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
    runtime.cudaGetErrorString.argtypes = (ctypes.c_int,)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


@functools.cache
def _driver() -> Any:
    """Return the CUDA driver library, which every process with a device has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuMemGetAddressRange_v2.argtypes = (ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t), pointer)
    return driver
