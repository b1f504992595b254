"""A child process with a framed pipe to it. This module knows neither the child's task nor the content of frames.

The child is a fresh interpreter (`python -m MODULE --fd N ...`), never a fork: forking a process that runs gRPC or
threads is unsafe. It leads its own process group, so that Ctrl-C in a terminal reaches only the parent, which then
stops it in order. It exits when the pipe closes, so it cannot outlive its parent.

A frame is its length (4 bytes, little-endian) and that many bytes. Both ends have the same limit. A longer frame is
refused before it is sent, and before more is received than what came with its length. A pipe closes after an error,
because the bytes after half a frame are meaningless.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import sys
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from typing import Literal

from bottega.background_tasks import copied
from bottega.errors import InternalError, Unavailable
from bottega.process import open_files

# A decoded image of 16 megapixels is 48 MiB, and kept latents of an edit's image are up to 26 MiB.
MAX_FRAME_BYTES = 80 * 2**20

_LENGTH = struct.Struct("<I")
# Upper bound on one send or receive on the event loop. If the other end is busy at the same time, one call would
# handle a whole frame (12 MiB: 15 ms).
_PIECE_BYTES = 256 * 2**10
# Bytes that the parent reads at once. An engine sends a dozen small messages after every step; with a system call for
# each, a message costs 38 us at both ends, and 28 us without (measured).
_READ_AHEAD_BYTES = 64 * 2**10
# A killed process is gone in milliseconds, unless it waits for a device. Then its parent must not wait for it.
_REAP_S = 10.0
# The variables that Python and libraries need to start. Any other variable may hold a secret.
_NEEDED = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
_WRAPPER = "bottega.process.sandbox"
_CONFINED: Mapping[str | None, Sequence[str]] = {None: (), "reads": (_WRAPPER,), "writes": (_WRAPPER, "--writes")}


class ChildProcess:
    """A running child process, created by `start`. `stop` must be called, even after it died."""

    def __init__(self, process: Process, channel: AsyncFramedPipe) -> None:
        self._process = process
        self.channel = channel

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        limits: Mapping[int, int] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        confined: Literal["reads", "writes"] | None = None,
    ) -> ChildProcess:
        """Start `python -m MODULE --fd N ARGUMENTS`.

        Args:
            env: Variables added to this process's environment, or to an almost empty one for a confined process.
            limits: Resource limits (resource.RLIMIT_...), set before anything is sent to the child.
            confined: For processes that open untrusted files. As far as the machine allows, the child has no network
                and may only read files, or also write them (see sandbox.py). None: no confinement.

        Raises TooManyOpenFiles, OSError.
        """
        with open_files.translated():
            ours, theirs = open_pair()
        # A limit on file sizes would truncate cached bytecode and break later imports of it.
        python = [sys.executable, "-B"] if confined else [sys.executable]
        command = [*python, "-m", *_CONFINED[confined], module, "--fd", str(theirs.fileno()), *arguments]
        inherited = {name: value for name, value in os.environ.items() if not confined or name in _NEEDED}
        try:
            with open_files.translated():
                process = await _spawn(command, theirs, {**inherited, **(env or {})})
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = cls(process, AsyncFramedPipe(ours, max_frame_bytes=max_frame_bytes))
        _limit(process.pid, limits or {})
        return child

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the child has ended, and return its exit status."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill the child."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self, grace_s: float) -> int | None:
        """Close the pipe, wait `grace_s` for the child to exit, then kill it.

        Returns its exit status, or None if even a killed process is not gone after some seconds.
        """
        self.channel.close()
        code = await self._exited(grace_s)
        if code is None:
            self.kill()
            code = await self._exited(_REAP_S)
        return code

    async def _exited(self, timeout_s: float) -> int | None:
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return None


class FramedPipe:
    """The child's end of the pipe, which blocks. Any thread may call `send`; one thread at a time calls `recv`."""

    def __init__(self, end: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = end
        self._max_frame_bytes = max_frame_bytes
        self._sending = threading.Lock()

    @classmethod
    def from_fd(cls, fd: int, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> FramedPipe:
        """Open the descriptor that the parent passed."""
        end = socket.socket(fileno=fd)
        end.setblocking(True)
        return cls(end, max_frame_bytes=max_frame_bytes)

    def send(self, payload: bytes) -> None:
        """Send one frame; block while the pipe is full.

        Raises InternalError for a frame beyond the limit, and Unavailable if the other end is gone.
        """
        _check_length(len(payload), self._max_frame_bytes)
        length = _LENGTH.pack(len(payload))
        with self._sending:
            try:
                # One call, so that the other end wakes once for a frame.
                sent = self._socket.sendmsg([length, payload])
                if sent < len(length) + len(payload):
                    self._socket.sendall(memoryview(length + payload)[sent:])
            except OSError as error:
                self.close()
                raise _gone() from error

    def recv(self) -> bytes | None:
        """Wait for the next frame and return it, or None if the other end is closed.

        Raises InternalError for a frame beyond the limit.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        _check_length(length, self._max_frame_bytes)
        return self._read(length)

    def close(self) -> None:
        """Close this end. A `recv` that waits in another thread returns None."""
        _shut(self._socket)
        self._socket.close()

    def _read(self, length: int) -> bytes | None:
        try:
            data = self._socket.recv(length, socket.MSG_WAITALL) if length else b""
        except OSError:
            return None
        return data if len(data) == length else None


class AsyncFramedPipe:
    """The parent's end of the pipe, for asyncio. One task at a time sends and one receives.

    No step of the event loop copies more than a piece of a frame.
    """

    def __init__(self, end: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        end.setblocking(False)
        self._socket = end
        self._max_frame_bytes = max_frame_bytes
        self._ahead = memoryview(b"")

    async def send(self, payload: bytes) -> None:
        """Send one frame. If sending is cancelled or fails half-way, the pipe is closed.

        Raises InternalError for a frame beyond the limit, and Unavailable if the other end is closed.
        """
        _check_length(len(payload), self._max_frame_bytes)
        loop = asyncio.get_running_loop()
        try:
            view = memoryview(payload)
            await loop.sock_sendall(self._socket, _LENGTH.pack(len(payload)) + view[:_PIECE_BYTES])
            for start in range(_PIECE_BYTES, len(payload), _PIECE_BYTES):
                await asyncio.sleep(0)  # a ready socket does not suspend: give other tasks a turn
                await loop.sock_sendall(self._socket, view[start : start + _PIECE_BYTES])
        except OSError as error:
            self.close()
            raise _gone() from error
        except asyncio.CancelledError:
            self.close()
            raise

    async def recv(self) -> bytes | None:
        """Return the next frame, or None if the other end is closed. If receiving is cancelled, the pipe is closed.

        Raises InternalError for a frame beyond the limit.
        """
        await asyncio.sleep(0)  # frames that are here already do not suspend: give other tasks a turn between them
        header = await self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        try:
            _check_length(length, self._max_frame_bytes)
        except InternalError:
            self.close()
            raise
        return await self._read(length)

    def close(self) -> None:
        """Close this end. The child then reads the end of the pipe."""
        _shut(self._socket)
        self._socket.close()

    async def _read(self, length: int) -> bytes | None:
        """Return `length` bytes, beginning with those read ahead, or None if the other end closes before."""
        if length <= len(self._ahead):
            return self._taken(length)
        pieces: list[memoryview | bytes] = [self._taken(len(self._ahead))]
        missing = length - len(pieces[0])
        try:
            while missing > 0:
                if len(pieces) > 1:
                    await asyncio.sleep(0)  # as in `send`
                piece = await self._piece(missing)
                if not piece:
                    return None
                pieces.append(piece[:missing])
                self._ahead = piece[missing:]
                missing -= len(pieces[-1])
        except OSError:
            return None
        except asyncio.CancelledError:
            self.close()
            raise
        return await copied(length, lambda: b"".join(pieces))

    async def _piece(self, missing: int) -> memoryview:
        """Return at least one of the `missing` bytes of a frame; empty at the end of the pipe. Raises OSError."""
        max_bytes = max(_READ_AHEAD_BYTES, min(missing, _PIECE_BYTES))
        return memoryview(await asyncio.get_running_loop().sock_recv(self._socket, max_bytes))

    def _taken(self, length: int) -> bytes:
        data, self._ahead = bytes(self._ahead[:length]), self._ahead[length:]
        return data


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise InternalError(f"a frame of {length} bytes is beyond the limit of {limit} bytes")


def _gone() -> Unavailable:
    return Unavailable("the process at the other end of the pipe is gone")


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed, or the other end is gone


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a pipe for frames."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


async def _spawn(command: Sequence[str], end: socket.socket, env: Mapping[str, str]) -> Process:
    return await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, env=env, pass_fds=(end.fileno(),), start_new_session=True
    )


def _limit(pid: int, limits: Mapping[int, int]) -> None:
    try:
        for kind, value in limits.items():
            resource.prlimit(pid, kind, (value, value))
    except ProcessLookupError:
        return  # already dead; callers that wait for it get the error
