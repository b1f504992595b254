"""Has LoRAs imported by child processes within limits: one process for each LoRA, a few at a time.

It opens no untrusted file itself.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import BadLora, BottegaError, Unavailable
from bottega.process import Loss, PoolLimits, PreparedCall, ProcessLost, ProcessPool, ProcessSpec
from bottega.storage import os_errors
from bottega.v1.lora_import_pb2 import LoraImportAnswer, LoraImportCall

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


class ImportProcesses(ProcessPool):
    """at_once: processes. deadline_s, cpu_s: of one import."""

    def __init__(self, *, at_once: int, deadline_s: float, cpu_s: int) -> None:
        self._deadline_s = deadline_s
        spec = ProcessSpec(
            name="import process",
            module="bottega.loras.importing.process",
            deadline_s=deadline_s,
            limits={resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_CORE: 0},
            environment=_ENVIRONMENT,
            sandbox="writes",
        )
        super().__init__(
            spec,
            PoolLimits(
                processes=at_once,
                max_waiting=_MAX_WAITING,
                limit="imports.at_once",
                waiting="LoRAs wait to be imported",
                attempts=1,
                new_process=True,
            ),
        )

    async def run(self, job: ImportJob, *, take_room: Callable[[], Awaitable[int]] | None = None) -> LoraImportAnswer:
        """Writes the canonical form to job.output.

        take_room: asked when its turn has come, how many bytes that may have.
        Raises BadLora where the source is refused, or its import beyond the limits; StorageUnavailable where the disk
        fails; QueueFull when too many wait; Unavailable where its process stood still; and what take_room raises.
        """

        async def prepare() -> PreparedCall:
            output_bytes = await take_room() if take_room is not None else sys.maxsize
            return PreparedCall(frame=_frame(job), limits=_limits(job, output_bytes))

        try:
            answer = LoraImportAnswer.FromString(await self.call(prepare))
        except ProcessLost as lost:
            raise self._error(lost.loss) from None
        if answer.refusal:
            raise BadLora(answer.refusal)
        if answer.errno:
            with os_errors.translated():
                raise OSError(answer.errno, os.strerror(answer.errno))
        return answer

    def _error(self, loss: Loss) -> BottegaError:
        match loss:
            case Loss.STALLED:
                late = f"the import was not done within {self._deadline_s:g} s; the store's machine may be busy"
                return Unavailable(late, retry_after_s=1.0)
            case Loss.OVERTIME:
                return BadLora(f"the file's import took more than {self._deadline_s:g} s")
        return BadLora("the file's import failed: it needs more memory or time than it may have, or is damaged")


def _frame(job: ImportJob) -> bytes:
    call = LoraImportCall(base=str(job.base), output=str(job.output))
    for source in job.sources:
        call.sources.add(
            path=str(source.path),
            adapter_config=source.adapter_config,
            component=source.component,
            root=str(source.root or ""),
        )
    return call.SerializeToString()


def _limits(job: ImportJob, output_bytes: int) -> dict[int, int]:
    memory = _ADDRESS_SPACE_BYTES + _COPIES * job.size_bytes
    # A canonical file has the tensors of its source; folding can make a convolution of nine times the bytes.
    return {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: min(memory, output_bytes)}
