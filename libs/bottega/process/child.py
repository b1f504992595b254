"""A child process with a framed pipe to it. This module does not know what the child does.

The child is a fresh interpreter (`python -m MODULE --fd N ...`), never a fork: forking a process that runs gRPC or
threads is unsafe. It leads its own process group, so that Ctrl-C in a terminal reaches only the parent, which then
stops it in order. It exits when the pipe closes, so it cannot outlive its parent.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from typing import Literal

from bottega.process import open_files
from bottega.process.framed_pipe import MAX_FRAME_BYTES, AsyncFramedPipe

# A killed process is gone in milliseconds, unless it waits for a device. Then its parent must not wait for it.
_REAP_S = 10.0
# The variables that Python and libraries need to start. Any other variable may hold a secret.
_NEEDED = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
_WRAPPER = "bottega.process.sandbox"
_CONFINED: Mapping[str | None, Sequence[str]] = {None: (), "reads": (_WRAPPER,), "writes": (_WRAPPER, "--writes")}


class ChildProcess:
    """A running child process, made by `start`. `stop` must be called, even after it died."""

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
                and may only read files, or also write them (see sandbox.py).

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
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the child has ended in any way; return its exit code."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill the child."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self, grace_s: float) -> int | None:
        """Close the pipe, wait for the child to exit, then kill it.

        Returns its exit code, or None if even a killed process is not gone after some seconds.
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
