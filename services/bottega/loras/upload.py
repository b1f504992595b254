"""Receives uploads: checks the announcement, limits unfinished uploads, and writes bytes to files as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bottega.addons.loras.wire.module_parts import COMPONENTS
from bottega.background_tasks import run_to_end
from bottega.errors import BadLora, InvalidRequest, QueueFull, StorageUnavailable, Violation
from bottega.storage import os_errors

# Seconds after which to retry: some running uploads have ended by then.
_RETRY_S = 5.0
_MAX_CONFIG_BYTES = 1 << 20
_SHA256_CHARACTERS = 64
# Bytes that must arrive within each `idle_s`: at the default of 30 s, 9 KiB a second.
_MIN_PROGRESS_BYTES = 256 << 10
_IDLE_S = 30.0


def _ignore() -> None:
    """Do nothing: the default of `check_disk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPart:
    """A file of an upload, as its sender announced it."""

    component: str
    """The only component of the base model to which the file's tensors belong; "" if unknown."""
    size_bytes: int
    adapter_config: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The announcement at the start of an upload."""

    sha256: str
    """SHA-256 of all bytes, in hex."""
    size_bytes: int
    """Total bytes of all files."""
    adapter_config: bytes
    parts: tuple[UploadPart, ...] = ()
    """The files, if there are several; () if there is one."""

    @property
    def files(self) -> tuple[UploadPart, ...]:
        """The files, in the order in which their bytes arrive."""
        whole = UploadPart(component="", size_bytes=self.size_bytes, adapter_config=self.adapter_config)
        return self.parts or (whole,)


def check_upload(upload: Upload, *, max_bytes: int) -> Iterator[Violation]:
    """Yield the violations in an announcement. All files together may have at most `max_bytes`."""
    if len(upload.sha256) != _SHA256_CHARACTERS or set(upload.sha256) - set("0123456789abcdef"):
        yield Violation(field="sha256", description="must be 64 hexadecimal digits, in lower case")
    if not 0 < upload.size_bytes <= max_bytes:
        yield Violation(field="size_bytes", description=f"must be from 1 to {max_bytes}")
    if len(upload.adapter_config) > _MAX_CONFIG_BYTES:
        yield Violation(field="adapter_config", description=f"must be at most {_MAX_CONFIG_BYTES} bytes")
    if upload.parts:
        yield from _check_parts(upload)


def _check_parts(upload: Upload) -> Iterator[Violation]:
    components = [part.component for part in upload.parts]
    if len(set(components)) < len(components) or set(components) - set(COMPONENTS):
        rule = f"each must be for a different component: {', '.join(COMPONENTS)}"
        yield Violation(field="parts", description=rule)
        return
    if upload.adapter_config:
        yield Violation(field="adapter_config", description="must be empty if there are parts, which have their own")
    for index, part in enumerate(upload.parts):
        if part.size_bytes < 1:
            yield Violation(field=f"parts[{index}].size_bytes", description="must be at least 1")
        if len(part.adapter_config) > _MAX_CONFIG_BYTES:
            rule = f"must be at most {_MAX_CONFIG_BYTES} bytes"
            yield Violation(field=f"parts[{index}].adapter_config", description=rule)
    if sum(part.size_bytes for part in upload.parts) != upload.size_bytes:
        yield Violation(field="size_bytes", description="must be the sum of the parts' sizes")


class _Incoming:
    """The chunks of an upload, which must make progress.

    A caller that sends nothing, empty chunks or single bytes would hold disk space that others need.
    """

    def __init__(self, chunks: AsyncIterator[bytes], idle_s: float) -> None:
        self._chunks = chunks
        self._idle_s = idle_s
        self._waited_s = 0.0
        self._received_bytes = 0

    async def next(self) -> bytes | None:
        """Return the next chunk, or None at the end.

        Raises InvalidRequest if too little has arrived for too long. Only time spent waiting for the caller counts.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._idle_s - self._waited_s)):
                chunk = await anext(self._chunks, None)
        except TimeoutError:
            raise _mismatch(
                f"{self._received_bytes} bytes in {self._idle_s:g} s and was ended: send it again"
            ) from None
        self._waited_s += time.monotonic() - began
        self._received_bytes += len(chunk or b"")
        if self._received_bytes >= _MIN_PROGRESS_BYTES:
            self._waited_s, self._received_bytes = 0.0, 0
        return chunk


async def receive(
    paths: Sequence[Path],
    upload: Upload,
    chunks: AsyncIterator[bytes],
    *,
    deadline_s: float,
    idle_s: float = _IDLE_S,
    check_disk: Callable[[], None] = _ignore,
) -> None:
    """Write an upload's bytes to files.

    Raises InvalidRequest if the bytes are late, too few or too many, BadLora if their SHA-256 is wrong, and
    StorageUnavailable.

    Args:
        paths: One for each of the upload's files.
        upload: The announcement.
        chunks: The bytes.
        deadline_s: Upper bound on the seconds of the upload.
        idle_s: Seconds in which each further 256 KiB, or the rest, must arrive.
        check_disk: Called before each write; may raise an error that ends the upload.
    """
    try:
        async with asyncio.timeout(deadline_s):
            await _received(paths, upload, _Incoming(chunks, idle_s), check_disk)
    except TimeoutError:
        late = f"fewer than the {upload.size_bytes} bytes that were announced in {deadline_s:g} s"
        raise _mismatch(f"{late}: use a faster network, or raise imports.upload_s at the store") from None


async def _received(paths: Sequence[Path], upload: Upload, chunks: _Incoming, check_disk: Callable[[], None]) -> None:
    hashed = hashlib.sha256()
    done = 0
    rest = b""
    for path, part in zip(paths, upload.files, strict=True):
        left = part.size_bytes
        async with _opened(path) as file:
            while left:
                piece = rest or await chunks.next()
                if piece is None:
                    raise _mismatch(f"{done} of the {upload.size_bytes} bytes that were announced")
                piece, rest = piece[:left], piece[left:]
                await asyncio.to_thread(_write, file, hashed, piece, check_disk)
                left -= len(piece)
                done += len(piece)
    if rest or await _goes_on(chunks):
        raise _mismatch(f"more than the {upload.size_bytes} bytes that were announced")
    if hashed.hexdigest() != upload.sha256:
        raise BadLora(
            f"the received bytes have the SHA-256 {hashed.hexdigest()}, not {upload.sha256}: upload the LoRA again"
        )


async def _goes_on(chunks: _Incoming) -> bool:
    """Return whether another byte arrives before the end."""
    while (chunk := await chunks.next()) is not None:
        if chunk:
            return True
    return False


@contextlib.asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[BinaryIO]:
    """Open a file to write, and close it even if the caller is cancelled. Raises StorageUnavailable."""
    opened: list[BinaryIO] = []
    try:
        await run_to_end(asyncio.to_thread(lambda: opened.append(_open(path))))
        yield opened[0]
    except BaseException:
        for file in opened:
            with contextlib.suppress(StorageUnavailable):  # the first error is raised
                await run_to_end(asyncio.to_thread(_close, file))
        raise
    await run_to_end(asyncio.to_thread(_close, opened[0]))


def _open(path: Path) -> BinaryIO:
    with os_errors.translated():
        return path.open("wb")


def _close(file: BinaryIO) -> None:
    """Flush and close the file."""
    with os_errors.translated():
        file.close()


def _write(file: BinaryIO, hashed: hashlib._Hash, chunk: bytes, check_disk: Callable[[], None]) -> None:
    check_disk()
    with os_errors.translated():
        file.write(chunk)
    hashed.update(chunk)


def _mismatch(what: str) -> InvalidRequest:
    return InvalidRequest(f"the upload contained {what}", violations=[Violation(field="chunk", description=what)])


class UploadLimits:
    """The unfinished uploads, by host.

    Args:
        max_uploads: Upper bound on unfinished uploads. One host may have half of them, but at least one.
        max_total_bytes: Upper bound on their total bytes. One host may have half of it, but at least `max_bytes`.
        max_bytes: Upper bound on the bytes of one upload.
    """

    def __init__(self, *, max_uploads: int, max_total_bytes: int, max_bytes: int) -> None:
        self._max_uploads = max_uploads
        self._max_total_bytes = max_total_bytes
        self._max_host_uploads = max(1, max_uploads // 2)
        self._max_host_bytes = max(max_bytes, max_total_bytes // 2)
        self._number: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def admitted(self, host: str, size_bytes: int) -> Iterator[None]:
        """Count an upload for the duration of the block. Raises QueueFull if a limit is reached."""
        number, total_bytes = self._number.total(), self._bytes.total()
        if number >= self._max_uploads or total_bytes + size_bytes > self._max_total_bytes:
            state = f"the store has {number} unfinished uploads of {total_bytes} bytes; it accepts at most"
            raise _full(state, self._max_uploads, self._max_total_bytes)
        number, total_bytes = self._number[host], self._bytes[host]
        if number >= self._max_host_uploads or total_bytes + size_bytes > self._max_host_bytes:
            state = f"your host has {number} unfinished uploads of {total_bytes} bytes, and the store accepts from one"
            raise _full(f"{state} host", self._max_host_uploads, self._max_host_bytes)
        self._number[host] += 1
        self._bytes[host] += size_bytes
        try:
            yield
        finally:
            # Subtracting a Counter also drops hosts without uploads.
            self._number -= Counter({host: 1})
            self._bytes -= Counter({host: size_bytes})


def _full(state: str, max_uploads: int, max_bytes: int) -> QueueFull:
    return QueueFull(f"{state} {max_uploads} of {max_bytes} bytes at once; try again soon", retry_after_s=_RETRY_S)
