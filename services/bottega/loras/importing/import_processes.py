"""Starts import processes, within limits: one for each LoRA, a few at a time. Opens no stranger's file itself."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import BadLora, InternalError, QueueFull, Unavailable
from bottega.process import ChildProcess, sandbox_status
from bottega.process.cpu_time import CpuTime
from bottega.storage import os_errors
from bottega.v1.lora_import_pb2 import LoraImportAnswer, LoraImportCall

_log = logging.getLogger(__name__)

# An interpreter that imports numpy takes .3 s; this is for a machine that is busy with everything else.
_START_S = 60.0
_STOP_S = 2.0
# The interpreter with numpy reserves about .6 GiB; the file is in memory once, read, and folded convolutions twice.
_ADDRESS_SPACE_BYTES = 1 << 30
_COPIES = 4
_MAX_WAITING = 64
# One thread: what an import computes is little, and every further one reserves address space.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSource:
    """A file or folder. adapter_config, component: of a file, PEFT's configuration and what it is for, if known.

    root: resolved; outside of which no file is opened, links followed; None: wherever they are.
    """

    path: Path
    root: Path | None = None
    adapter_config: bytes = b""
    component: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportJob:
    """What is to be imported. size_bytes: of all sources. output: an empty file. base: its folder."""

    sources: tuple[ImportSource, ...]
    size_bytes: int
    base: Path
    output: Path


class ImportProcesses:
    """at_once: processes. deadline_s, cpu_s: of one import."""

    def __init__(self, *, at_once: int, deadline_s: float, cpu_s: int) -> None:
        self._deadline_s = deadline_s
        self._cpu_s = cpu_s
        self._room = asyncio.Semaphore(at_once)
        self._waiting = 0

    async def run(self, job: ImportJob, *, take_room: Callable[[], Awaitable[int]] | None = None) -> LoraImportAnswer:
        """Writes the canonical form to job.output.

        take_room: asked when its turn has come, how many bytes that may have.
        Raises BadLora where the source is refused, or its import beyond the limits; StorageUnavailable where the disk
        fails; QueueFull when too many wait; Unavailable where its process stood still; and what take_room raises.
        """
        if self._waiting >= _MAX_WAITING:
            raise QueueFull("too many LoRAs wait to be imported", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with self._room:
                answer = await self._serve(job, await take_room() if take_room is not None else sys.maxsize)
        finally:
            self._waiting -= 1
        if answer.refusal:
            raise BadLora(answer.refusal)
        if answer.errno:
            with os_errors.translated():
                raise OSError(answer.errno, os.strerror(answer.errno))
        return answer

    async def _serve(self, job: ImportJob, output_bytes: int) -> LoraImportAnswer:
        limits = self._limits(job, output_bytes)
        child = await ChildProcess.start(
            "bottega.loras.importing.process", env=_ENVIRONMENT, limits=limits, confined="writes"
        )
        try:
            await self._started(child)
            spent = CpuTime(child.pid)
            async with asyncio.timeout(self._deadline_s):
                answered = await self._exchange(child, job)
        except TimeoutError:
            stood_still = spent.stood_still(self._deadline_s)
            child.kill()
            if stood_still:
                late = f"the import was not done within {self._deadline_s:g} s; the store's machine may be busy"
                raise Unavailable(late, retry_after_s=1.0) from None
            raise BadLora(f"the file's import took more than {self._deadline_s:g} s") from None
        finally:
            code = await child.stop(_STOP_S)
        if answered is None:
            _log.warning("an import process died", extra={"pid": child.pid, "exit_code": code})
            raise BadLora("the file's import failed: it needs more memory or time than it may have, or is damaged")
        return LoraImportAnswer.FromString(answered)

    async def _started(self, child: ChildProcess) -> None:
        try:
            async with asyncio.timeout(_START_S):
                ready = await child.channel.recv()
        except TimeoutError:
            ready = None
        if ready is None:
            child.kill()
            raise InternalError("an import process did not start")
        sandbox_status.tell(child.pid)

    async def _exchange(self, child: ChildProcess, job: ImportJob) -> bytes | None:
        call = LoraImportCall(base=str(job.base), output=str(job.output))
        for source in job.sources:
            call.sources.add(
                path=str(source.path),
                adapter_config=source.adapter_config,
                component=source.component,
                root=str(source.root or ""),
            )
        try:
            await child.channel.send(call.SerializeToString())
            return await child.channel.recv()
        except Unavailable:
            return None

    def _limits(self, job: ImportJob, output_bytes: int) -> dict[int, int]:
        memory = _ADDRESS_SPACE_BYTES + _COPIES * job.size_bytes
        # A canonical file has the tensors of its source; folding can make a convolution of nine times the bytes.
        return {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_CPU: self._cpu_s,
            resource.RLIMIT_FSIZE: min(memory, output_bytes),
            resource.RLIMIT_CORE: 0,
        }
