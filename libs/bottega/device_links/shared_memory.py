"""Links within a host over device memory that two processes share: one allocates and exports it, the other maps it.

Exported memory must be freed only when no other process has it mapped; otherwise the other process's device would lose
it. The handle goes over a socket that the other process keeps open as long as it has the memory mapped, so that its end
or death is noticed.

Each slot (message buffer) of the sender is exported once. The receiver copies from it into slots on its own device, so
it does not depend on memory that ends with the sender. The sender announces bytes only when they are written, because
the receiver's operations are not ordered with the sender's streams.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bottega.device_links.ends import DeviceReceiver, DeviceSender, DeviceSlots, Inflow, Moved, no_memory
from bottega.device_links.tensors import DeviceTensor, reached
from bottega.errors import BadFrame, DeadlineExceeded
from bottega.transport import Deadline, Layout, Limits
from bottega.transport.channel.frames import Frame, FrameKind

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


# A slot is announced before its first message. A peer that reads no frames takes no message either.
_ANNOUNCE_S = 5.0
# For a copy that still runs when its link ends, which takes milliseconds.
_COPY_S = 5.0

_Announce = Callable[[int, int, socket.socket], None]


class PoolSender(DeviceSender):
    """The sender of one direction over shared device memory."""

    def __init__(self, connection: socket.socket, memory: SharedMemory) -> None:
        super().__init__(connection, memory.device, _ExportedSlots(memory, self._announce))

    def prepare(self, piece: DeviceTensor, deadline: Deadline) -> None:
        if not reached(piece.written, deadline):
            raise DeadlineExceeded("the device, which is busy or stuck, did not write a message in time")

    def _announce(self, index: int, size_bytes: int, held: socket.socket) -> None:
        frame = Frame(FrameKind.SEGMENT, slot=index, size=size_bytes)
        self.send_frame_with_descriptor(frame, held.fileno(), Deadline.after(_ANNOUNCE_S))


class _ExportedSlots(DeviceSlots):
    """Slots in exported device memory.

    Args:
        announce: Tells the receiver about the memory of a slot.
    """

    def __init__(self, memory: SharedMemory, announce: _Announce) -> None:
        super().__init__(memory.device)
        self._shared = memory
        self._announce = announce
        self._exports: dict[int, Export] = {}
        # Memory of slots that have grown, until the receiver has mapped the new memory.
        self._outgrown: list[Export] = []

    def allocate(self, index: int, size_bytes: int) -> Tensor:
        for export in [export for export in self._outgrown if not export.mapped]:
            self._outgrown.remove(export)
            export.free()
        export, held = Export.of(self._shared.export(size_bytes))
        if (before := self._exports.pop(index, None)) is not None:
            self._outgrown.append(before)
        self._exports[index] = export
        with held:
            self._announce(index, size_bytes, held)
        return export.memory

    def clear(self) -> None:
        super().clear()
        free_when_unmapped([*self._outgrown, *self._exports.values()])
        self._outgrown.clear()
        self._exports.clear()


class PoolReceiver(DeviceReceiver):
    """The receiver of one direction over shared device memory."""

    def __init__(self, connection: socket.socket, memory: SharedMemory, limits: Limits) -> None:
        super().__init__(connection, memory.device)
        self._shared = memory
        self._limits = limits
        self._segments: dict[int, _MappedSlot] = {}
        self._expected: Frame | None = None

    def receive_frame(self, deadline: Deadline) -> Frame | None:
        while True:
            if self._expected is None:
                frame = super().receive_frame(deadline)
                if frame is None or frame.kind != FrameKind.SEGMENT:
                    return frame
                self._expected = frame
            if not self.wait_readable(deadline):
                return None
            announced, self._expected = self._expected, None
            self._map(announced)

    def check_slot(self, index: int, layout: Layout) -> None:
        segment = self._segments.get(index)
        if segment is None or segment.size_bytes < layout.size_bytes:
            raise BadFrame("the peer sent a message that is larger than the memory that it shared for it")

    def begin(self, index: int, target: Tensor, start: int) -> Inflow:
        self._segments[index].mapped.copy_to(target, start)
        return Moved(self.device)

    def close(self) -> None:
        super().close()
        self.finish(Deadline.after(_COPY_S))
        for segment in self._segments.values():
            segment.give_up()
        self._segments.clear()

    def _map(self, announced: Frame) -> None:
        """Map the memory whose handle waits in the socket that arrives with the next byte."""
        held = self._receive_socket()
        try:
            if announced.slot >= self._limits.slots or not 0 < announced.size <= self._limits.segment_bytes:
                raise BadFrame(f"the peer shares slot {announced.slot} of {announced.size} bytes, beyond the limits")
            handle = held.recv(HANDLE_BYTES, socket.MSG_DONTWAIT)
            if len(handle) != HANDLE_BYTES:
                raise BadFrame("the peer shares memory without a handle for it")
            mapped = self._shared.map(handle, announced.size)
        except BaseException as error:
            held.close()
            if isinstance(error, OSError):
                raise BadFrame(f"the peer shares memory that cannot be mapped: {error.strerror or error}") from error
            raise
        if (before := self._segments.pop(announced.slot, None)) is not None:
            before.give_up()
        self._segments[announced.slot] = _MappedSlot(mapped, announced.size, held)

    def _receive_socket(self) -> socket.socket:
        descriptor = self.receive_descriptor()
        try:
            return socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise BadFrame("the peer sent a descriptor that is not a socket to share memory") from None


class _MappedSlot:
    """A slot of the sender, mapped into this process. Closing `held` tells the sender that the memory is unmapped."""

    def __init__(self, mapped: Mapped, size_bytes: int, held: socket.socket) -> None:
        self.mapped = mapped
        self.size_bytes = size_bytes
        self._held = held

    def give_up(self) -> None:
        try:
            self.mapped.unmap()
        finally:
            self._held.close()
