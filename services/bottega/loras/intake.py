"""How LoRAs come in: uploaded bytes or a path below the root, imported, checked and kept. Knows no wire.

What was brought in vain leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bottega import rules
from bottega.errors import BadLora, BottegaError, InvalidRequest, QueueFull, TooLarge, Violation
from bottega.lora.canonical import COMPONENTS
from bottega.loras.catalogue import Catalogue
from bottega.loras.files import LoraFiles
from bottega.loras.importing.importer import Import, Importer
from bottega.loras.metrics import LoraMetrics
from bottega.loras.records import LoraRecord
from bottega.storage import faults

_log = logging.getLogger(__name__)

_MOST_WORDS = 16
_MAX_WORD_CHARACTERS = 200
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATH_CHARACTERS = 4096
_SHA256_CHARACTERS = 64
# Uploads that may be under way, each with a file of its own on the disk.
_MOST_UPLOADS = 16
# Between two messages of an upload; a caller that is there sends one in no time.
_CHUNK_S = 60.0
# What of a folder may be read.
_READ = ("*.safetensors", "adapter_config.json")
_IMPORTED = (*_READ, *(f"{component}/{name}" for component in COMPONENTS for name in _READ))


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What somebody says of the LoRA that he brings. trigger_words: none are those that its file says, or that it has
    already."""

    name: str
    base: str
    trigger_words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What an upload begins with. sha256: of the file, hex. size_bytes: of the file."""

    brought: Brought
    sha256: str
    size_bytes: int
    adapter_config: bytes


class Intake:
    """bases: by name, the folders of base models. root: below it are the paths that may be registered. upload_s: in
    which an upload's bytes have to come."""

    def __init__(
        self,
        *,
        bases: Mapping[str, Path],
        root: Path | None,
        max_bytes: int,
        upload_s: float,
        files: LoraFiles,
        catalogue: Catalogue,
        importer: Importer,
        metrics: LoraMetrics,
    ) -> None:
        self._bases = bases
        self._root = root.resolve() if root is not None else None
        self._max_bytes = max_bytes
        self._upload_s = upload_s
        self._files = files
        self._catalogue = catalogue
        self._importer = importer
        self._metrics = metrics
        self._uploads = 0
        # Of a digest's file and its row: between them nobody else may think that the file is nobody's.
        self.keeping = asyncio.Lock()

    async def upload(self, upload: Upload, chunks: AsyncIterator[bytes]) -> LoraRecord:
        """Takes a file in. Raises InvalidRequest, BadLora, TooLarge, LoraExists, QueueFull, StorageUnavailable."""
        rules.refuse([*self._check(upload.brought), *self._check_upload(upload)])
        if self._uploads >= _MOST_UPLOADS:
            raise QueueFull("the store takes as many uploads as it can at once", retry_after_s=1.0)
        self._uploads += 1
        try:
            with self._counted():
                async with self._spool() as spool:
                    await self._receive(spool, upload, chunks)
                    return await self._import(upload.brought, spool, upload.size_bytes, upload.adapter_config)
        finally:
            self._uploads -= 1

    async def register(self, brought: Brought, path: str) -> LoraRecord:
        """Takes in what is at a path below the root. Raises as `upload` does."""
        violations = list(self._check(brought))
        if not 0 < len(path) <= _MAX_PATH_CHARACTERS or "\0" in path:
            violations.append(Violation(field="path", description="must be the path of a file or a folder"))
        rules.refuse(violations)
        with self._counted():
            source, size_bytes = await asyncio.to_thread(self._below_root, path)
            return await self._import(brought, source, size_bytes, b"")

    async def bring(self, brought: Brought, path: Path) -> LoraRecord:
        """Takes in what the store's own configuration names, wherever it is. Raises as `upload` does."""
        rules.refuse(self._check(brought))
        with self._counted():
            source = await asyncio.to_thread(path.resolve)
            size_bytes = await asyncio.to_thread(self._measured, source)
            return await self._import(brought, source, size_bytes, b"")

    async def _receive(self, spool: Path, upload: Upload, chunks: AsyncIterator[bytes]) -> None:
        """Writes an upload's bytes in time. Raises as `_received` does."""
        try:
            async with asyncio.timeout(self._upload_s):
                await _received(spool, upload, chunks)
        except TimeoutError:
            late = f"fewer than the {upload.size_bytes} bytes that were announced in {self._upload_s:g} s"
            raise _mismatch(f"{late}: use a faster network, or raise imports.upload_s at the store") from None

    async def _import(self, brought: Brought, source: Path, size_bytes: int, adapter_config: bytes) -> LoraRecord:
        async with self._spool() as output:
            job = Import(
                source=source,
                size_bytes=size_bytes,
                adapter_config=adapter_config,
                base=self._bases[brought.base],
                output=output,
            )
            answer = await self._importer.run(job)
            async with self.keeping:
                keep = asyncio.create_task(self._keep(brought, output, answer.format, answer.trigger_phrase))
                try:
                    return await asyncio.shield(keep)
                finally:
                    # A caller that goes meanwhile leaves no file without its row: that would count until a restart.
                    await asyncio.wait([keep])

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a refusal by its reason."""
        try:
            yield
        except BottegaError as error:
            self._metrics.imported(error.reason_name.lower())
            raise

    @contextlib.asynccontextmanager
    async def _spool(self) -> AsyncIterator[Path]:
        """A file of its own, which is gone afterwards, or has become a LoRA. Raises StorageUnavailable."""
        making = asyncio.create_task(asyncio.to_thread(self._files.spool))
        try:
            yield await asyncio.shield(making)
        finally:
            # A caller that goes while it is made leaves nothing behind either.
            await asyncio.wait([making])
            if making.exception() is None:
                await asyncio.to_thread(making.result().unlink, missing_ok=True)

    async def _keep(self, brought: Brought, output: Path, kind: str, trigger: str) -> LoraRecord:
        digest, lora = await asyncio.to_thread(self._files.adopt, output)
        record = LoraRecord(
            name=brought.name,
            digest=digest,
            base=brought.base,
            rank=lora.rank,
            modules=len(lora.modules),
            size_bytes=lora.file_bytes,
            text_bytes=lora.text_bytes,
            trigger_words=brought.trigger_words or ((trigger,) if trigger else ()),
            format=kind,
            added_s=time.time(),
        )
        try:
            kept = await self._catalogue.add(record, rewords=bool(brought.trigger_words))
        except BottegaError:
            if not await self._catalogue.names(digest):
                await asyncio.to_thread(self._files.remove, digest)
            raise
        self._metrics.imported("added")
        facts = {"lora": kept.name, "digest": digest, "base": kept.base, "rank": kept.rank, "modules": kept.modules}
        _log.info("a LoRA is kept", extra=facts)
        return kept

    def _check(self, brought: Brought) -> list[Violation]:
        violations = []
        if not rules.is_adapter_name(brought.name):
            violations.append(Violation(field="name", description=f"must be {rules.ADAPTER_NAMES}"))
        if brought.base not in self._bases:
            listed = ", ".join(sorted(self._bases)) or "none"
            violations.append(Violation(field="base", description=f"the store has these base models: {listed}"))
        words = brought.trigger_words
        if len(words) > _MOST_WORDS or not all(0 < len(w) <= _MAX_WORD_CHARACTERS and w.isprintable() for w in words):
            rule = f"at most {_MOST_WORDS}, each of 1 to {_MAX_WORD_CHARACTERS} printable characters"
            violations.append(Violation(field="trigger_words", description=rule))
        return violations

    def _check_upload(self, upload: Upload) -> list[Violation]:
        violations = []
        if len(upload.sha256) != _SHA256_CHARACTERS or set(upload.sha256) - set("0123456789abcdef"):
            violations.append(Violation(field="sha256", description="must be 64 hexadecimal digits, in lower case"))
        if not 0 < upload.size_bytes <= self._max_bytes:
            violations.append(Violation(field="size_bytes", description=f"must be 1 to {self._max_bytes}"))
        if len(upload.adapter_config) > _MAX_CONFIG_BYTES:
            violations.append(Violation(field="adapter_config", description=f"at most {_MAX_CONFIG_BYTES} bytes"))
        return violations

    def _below_root(self, path: str) -> tuple[Path, int]:
        """The path with its links followed, and the bytes of what would be read of it."""
        if self._root is None:
            raise _refused("this store lets nobody register paths: its configuration has no imports.root")
        source = (self._root / path).resolve()
        if not source.is_relative_to(self._root):
            raise _refused(f"must be below {self._root}, links followed")
        with _reading():
            strangers = [file for file in _imported(source) if not file.resolve().is_relative_to(self._root)]
        if strangers:
            raise _refused(f"{strangers[0].name} must be below {self._root}, links followed")
        return source, self._measured(source)

    def _measured(self, source: Path) -> int:
        """The bytes of what would be read of a file or folder. Raises InvalidRequest, TooLarge."""
        with _reading():
            if source.is_dir():
                size_bytes = sum(file.stat().st_size for file in _imported(source))
            elif source.is_file():
                size_bytes = source.stat().st_size
            else:
                raise _refused("is no file or folder on the store's machine")
        if size_bytes > self._max_bytes:
            raise TooLarge(
                f"{size_bytes} bytes are more than imports.max_bytes, {self._max_bytes}",
                metadata={"limit": "max_bytes"},
            )
        return size_bytes


def _imported(folder: Path) -> list[Path]:
    """What an import reads of a folder; nothing of what is none."""
    return [file for pattern in _IMPORTED for file in folder.glob(pattern)]


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refused(f"the store cannot read it: {error.strerror}") from error


async def _received(spool: Path, upload: Upload, chunks: AsyncIterator[bytes]) -> None:
    """Writes the upload's bytes, and checks them. Raises BadLora, InvalidRequest."""
    hashed = hashlib.sha256()
    done = 0
    with await asyncio.to_thread(spool.open, "wb") as file:
        while (chunk := await _next(chunks)) is not None:
            done += len(chunk)
            if done > upload.size_bytes:
                raise _mismatch(f"more than the {upload.size_bytes} bytes that were announced")
            await asyncio.to_thread(_write, file, hashed, chunk)
    if done != upload.size_bytes:
        raise _mismatch(f"{done} of the {upload.size_bytes} bytes that were announced")
    if hashed.hexdigest() != upload.sha256:
        raise BadLora(f"the bytes that came have the SHA-256 {hashed.hexdigest()}, not {upload.sha256}: send it again")


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(_CHUNK_S):
            return await anext(chunks, None)
    except TimeoutError:
        raise _mismatch(f"nothing more for {_CHUNK_S:g} s") from None


def _write(file: BinaryIO, hashed: hashlib._Hash, chunk: bytes) -> None:
    with faults.translated():
        file.write(chunk)
    hashed.update(chunk)


def _mismatch(what: str) -> InvalidRequest:
    return InvalidRequest(f"the upload brought {what}", violations=[Violation(field="chunk", description=what)])


def _refused(rule: str) -> InvalidRequest:
    return InvalidRequest(f"path: {rule}", violations=[Violation(field="path", description=rule)])
