"""Memory of a device that two processes of a host share: one allocates and exports it, the other maps it.

What is exported is freed when nobody has it mapped: freeing it earlier would take it from under the other process's
device. The handle goes over a socket that the other end holds for as long as it has the memory mapped, so that its end,
or its death, is seen.
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
"""Of what another process maps memory by."""

# For a process whose link has ended to give up what it has mapped. What one that is stopped holds is never freed.
_GIVE_UP_S = 60.0
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses say what is where


class Exported(Protocol):
    """Memory that another process may map by its handle. memory: flat uint8."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def handle(self) -> bytes: ...

    def free(self) -> None:
        """Only when nobody has it mapped."""
        ...


class Mapped(Protocol):
    """Another process's memory, mapped here."""

    def copy_to(self, target: Tensor, start: int) -> None:
        """Enqueues a copy of the bytes from `start` on into flat bytes of this process's device, in the stream that is
        current."""
        ...

    def unmap(self) -> None:
        """Once; when no copy runs."""
        ...


class SharedMemory(Protocol):
    """How memory of a device is shared."""

    @property
    def device(self) -> torch.device: ...

    def export(self, size_bytes: int) -> Exported:
        """Raises NoSharedMemory."""
        ...

    def map(self, handle: bytes, size_bytes: int) -> Mapped:
        """Raises BadFrame where the handle is of no such memory."""
        ...


class Export:
    """An export as its sender holds it: with the socket whose other end is the receiver's."""

    def __init__(self, exported: Exported, held: socket.socket) -> None:
        self.memory = exported.memory
        self._exported = exported
        self.held = held

    @classmethod
    def of(cls, exported: Exported) -> tuple[Export, socket.socket]:
        """The export, and the end that goes to the receiver: the handle waits in it."""
        here, there = socket.socketpair()
        here.sendall(exported.handle)
        return cls(exported, here), there

    @property
    def mapped(self) -> bool:
        """Whether the receiver has it mapped, or may yet."""
        poll = select.poll()
        poll.register(self.held, select.POLLRDHUP)
        return not poll.poll(0)

    def free(self) -> None:
        """Only when it is mapped no more."""
        self._exported.free()
        self.held.close()


def free_when_unmapped(exports: Sequence[Export]) -> None:
    """Frees them as their receiver gives them up, in the background: in a moment, unless that is stopped."""
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
            _log.warning("memory of a device stays taken: the process that mapped it does not give it up", extra=facts)


class CudaMemory:
    """A SharedMemory of CUDA (cudaIpcGetMemHandle), allocated apart from torch's: an export shows all of an
    allocation, and torch's hold more than one tensor."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where the runtime's library is not to be had."""
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
        """A copy from beyond the memory's end would end all work of this process on its device."""
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
    """Memory of a device as torch takes it over: by address (the CUDA array interface), not freed by it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _check(status: int, call: str) -> None:
    """Raises BadFrame, naming the call: what cannot be shared ends its link, and another backend is tried."""
    if status:
        why = _runtime().cudaGetErrorString(status).decode(errors="replace")
        _runtime().cudaGetLastError()  # else torch would raise it at its next call
        raise BadFrame(f"memory of the devices cannot be shared: {call}: {why}")


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises OSError."""
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
    """The driver, which every process with a device has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuMemGetAddressRange_v2.argtypes = (ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t), pointer)
    return driver
