"""Runs imports in child processes with limits: one process for each LoRA, a few at a time.

The parent process opens no untrusted file.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import BadLora, BottegaError, Unavailable
from bottega.process.limited_process import Loss, ProcessLost, ProcessSpec
from bottega.process.process_pool import PoolLimits, PreparedCall, ProcessPool
from bottega.storage import os_errors
from bottega.v1.lora_import_pb2 import LoraImportAnswer, LoraImportCall

# The interpreter with numpy reserves about 0.6 GiB. The file is in memory once, and folded convolutions twice.
_ADDRESS_SPACE_BYTES = 1 << 30
_COPIES = 4
_MAX_WAITING = 64
# One thread: an import computes little, and every further thread reserves address space.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSource:
    """A file or folder to import."""

    path: Path
    root: Path | None = None
    """A resolved folder outside of which no file is opened, even through symlinks; None means no restriction."""
    adapter_config: bytes = b""
    """PEFT's configuration of a file, if it is not beside the file; else b""."""
    component: str = ""
    """The only component to which a file's tensors belong; "" if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportJob:
    """A LoRA to import, and where to write it."""

    sources: tuple[ImportSource, ...]
    size_bytes: int
    """Total bytes of all sources."""
    base: Path
    """Folder of the base model."""
    output: Path
    """An empty file, which receives the canonical form."""
    name: str = ""
    """Its name in the store."""
    trigger_words: tuple[str, ...] = ()
    """Trigger words that the caller gave."""
    base_model: str = ""
    """The base model that the caller's model card names."""
    allow_partial: bool = False
    """Whether layers that match nothing are ignored instead of refused."""


class ImportProcesses(ProcessPool):
    """A pool of import processes.

    Args:
        at_once: Upper bound on the number of processes.
        deadline_s: Upper bound on the seconds of one import.
        cpu_s: Upper bound on the processor seconds of one import.
    """

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
                waiting="too many LoRAs wait to be imported",
                attempts=1,
                new_process=True,
            ),
        )

    async def run(self, job: ImportJob, *, take_room: Callable[[], Awaitable[int]] | None = None) -> LoraImportAnswer:
        """Import a LoRA: write its canonical form to `job.output`.

        Args:
            job: The LoRA.
            take_room: Called when the import starts. Returns the upper bound on the bytes of the output.

        Raises:
            BadLora: The LoRA is refused, or its import exceeds a limit.
            StorageUnavailable: The disk failed.
            QueueFull: Too many imports are waiting.
            Unavailable: The process made no progress.
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
        return BadLora("the file's import failed: it needs more memory or time than allowed, or is damaged")


def _frame(job: ImportJob) -> bytes:
    call = LoraImportCall(
        base=str(job.base),
        output=str(job.output),
        name=job.name,
        trigger_words=job.trigger_words,
        base_model=job.base_model,
        allow_partial=job.allow_partial,
    )
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
    # A canonical file has the tensors of its source. Folding can make a convolution nine times larger.
    return {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: min(memory, output_bytes)}
