"""Imports LoRAs from uploads, paths and the configuration: checks and converts files, and adds them to the store.

A failed import leaves no files behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter

from bottega import rules
from bottega.addons.loras.wire.module_parts import COMPONENTS
from bottega.background_tasks import acquired, run_to_end
from bottega.errors import BottegaError, InvalidRequest, LoraNotFound, TooLarge, Violation
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.config import ImportConfig, OwnLora
from bottega.loras.files import Reservation
from bottega.loras.importing.import_processes import ImportJob, ImportProcesses, ImportSource
from bottega.loras.object_files import LoraFiles
from bottega.loras.records import MAX_LISTED_IGNORED, CatalogueRecord
from bottega.loras.upload import Upload, UploadLimits, check_upload, receive
from bottega.miniature import WEIGHTS
from bottega.process import open_files
from bottega.storage.folders import check_below, resolved_below

if TYPE_CHECKING:  # psycopg is optional
    from bottega.loras.shared_catalogue import SharedCatalogue

_log = logging.getLogger(__name__)

# Paths that a configuration may use for the embedded model's LoRAs, wherever the model is installed.
_EMBEDDED = {f"miniature/{name}": WEIGHTS / "loras" / name for name in ("striped", "checked", "dusk")}
_MAX_WORDS = 16
_MAX_PATH_CHARACTERS = 4096
# Extra bytes of a canonical file: its header may be longer than its source's. Folding makes convolutions larger.
_MAX_HEADER_BYTES, _MIN_HEADER_BYTES = 1 << 20, 4 << 10
_FOLDED = 4
# Names of the files of a folder that an import may read.
_READ = ("*.safetensors", "adapter_config.json")
_IMPORTED = (*_READ, *(f"{component}/{name}" for component in COMPONENTS for name in _READ))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """The properties of a LoRA to import, as the caller states them."""

    name: str
    base: str
    """Name of its base model."""
    trigger_words: tuple[str, ...]
    """Trigger words. If empty, a LoRA in the store keeps its words, and a new one gets the phrase in its file."""
    base_model: str = ""
    """The base model that its model card names, if the caller sent it."""
    allow_partial: bool = False
    """Whether layers that match nothing are ignored instead of refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLora:
    """A LoRA that was imported."""

    record: CatalogueRecord
    family: str
    """Display name of the base model's family; "" if unknown."""
    note: str
    """A contradiction between its metadata and its layers, in a sentence; "" without one."""


class LoraImporter:
    """Imports LoRAs into the store."""

    def __init__(
        self,
        *,
        bases: Mapping[str, Path],
        config: ImportConfig,
        files: LoraFiles,
        catalogue: LoraCatalogue | SharedCatalogue,
        processes: ImportProcesses,
    ) -> None:
        self._bases = bases
        self._root = Path(config.root).resolve() if config.root else None
        self._max_bytes = config.max_bytes
        self._upload_s = config.upload_s
        self._idle_s = config.idle_s
        self._files = files
        self._catalogue = catalogue
        self._processes = processes
        self.imports = Counter("bottega_lora_imports", "Imports of LoRAs, by outcome.", ("outcome",), registry=None)
        """Counts imports by outcome: "added", or the reason of the error."""
        self._uploads = UploadLimits(
            max_uploads=config.uploads, max_total_bytes=config.upload_bytes, max_bytes=config.max_bytes
        )
        # Held from writing a digest's file until its row is written, because a file without a row is quarantined.
        self._write_lock = catalogue.write_lock

    async def upload(
        self, request: ImportRequest, upload: Upload, chunks: AsyncIterator[bytes], *, host: str = ""
    ) -> ImportedLora:
        """Import an upload, and return the LoRA.

        Raises InvalidRequest, BadLora, TooLarge, LoraExists, QueueFull, StorageUnavailable.

        Args:
            host: The caller's host, for the limits per host.
        """
        rules.refuse([*self._check(request), *check_upload(upload, max_bytes=self._max_bytes)])
        with self._counted(), self._uploads.admitted(host, upload.size_bytes):
            async with contextlib.AsyncExitStack() as stack:
                # Space for the uploaded files and, at the same time, for the canonical file.
                room = await stack.enter_async_context(self._room(upload.size_bytes + _kept_bytes(upload.size_bytes)))
                spools = [await stack.enter_async_context(self._spool()) for _ in upload.files]
                room.files.extend(spools)
                await receive(
                    spools,
                    upload,
                    chunks,
                    deadline_s=self._upload_s,
                    idle_s=self._idle_s,
                    check_disk=self._files.room.check_disk,
                )
                sources = [
                    ImportSource(path=spool, adapter_config=part.adapter_config, component=part.component)
                    for spool, part in zip(spools, upload.files, strict=True)
                ]
                return await self._import(request, sources, upload.size_bytes, room)

    async def register(self, request: ImportRequest, path: str) -> ImportedLora:
        """Import a file or folder below `imports.root`. Raises the errors of `upload`."""
        violations = list(self._check(request))
        if not 0 < len(path) <= _MAX_PATH_CHARACTERS or "\0" in path:
            rule = f"must be the path of a file or a folder, of at most {_MAX_PATH_CHARACTERS} characters"
            violations.append(Violation(field="path", description=rule))
        rules.refuse(violations)
        with self._counted():
            source, size_bytes = await asyncio.to_thread(self._below_root, path)
            async with self._room(_kept_bytes(size_bytes)) as room:
                return await self._import(request, [ImportSource(path=source, root=self._root)], size_bytes, room)

    async def import_configured(
        self, loras: Mapping[str, OwnLora], *, at_once: int, lost: Collection[str]
    ) -> dict[str, str]:
        """Import the configured LoRAs that the store lacks. Return, by name, why some could not be imported.

        Args:
            at_once: Upper bound on simultaneous imports. More would wait for import processes.
            lost: Digests whose files are missing.
        """
        room = asyncio.Semaphore(at_once)
        left_out: dict[str, str] = {}

        async def import_missing(name: str, own: OwnLora) -> None:
            async with room:
                with contextlib.suppress(LoraNotFound):
                    if (await self._catalogue.get(name)).digest not in lost:
                        return
                request = ImportRequest(name=name, base=own.base, trigger_words=())
                try:
                    await self._import_own(request, _EMBEDDED.get(own.path, Path(own.path)))
                except BottegaError as error:
                    facts = {"lora": name, "path": own.path, "error": error.message}
                    _log.error("a LoRA of the configuration could not be imported", extra=facts)
                    left_out[name] = error.message

        await asyncio.gather(*(import_missing(name, own) for name, own in loras.items()))
        return left_out

    async def _import_own(self, request: ImportRequest, path: Path) -> ImportedLora:
        rules.refuse(self._check(request))
        with self._counted():
            source = await asyncio.to_thread(path.resolve)
            size_bytes = await asyncio.to_thread(self._measured, source)
            async with self._room(_kept_bytes(size_bytes)) as room:
                return await self._import(request, [ImportSource(path=source)], size_bytes, room)

    async def _import(
        self, request: ImportRequest, sources: Sequence[ImportSource], size_bytes: int, room: Reservation
    ) -> ImportedLora:
        async with self._spool() as output:
            room.files.append(output)

            async def take_room() -> int:
                beside_bytes = room.size_bytes - _kept_bytes(size_bytes)
                await asyncio.to_thread(self._files.room.grow, room, room.size_bytes + _FOLDED * size_bytes)
                return room.size_bytes - beside_bytes

            job = ImportJob(
                sources=tuple(sources),
                size_bytes=size_bytes,
                base=self._bases[request.base],
                output=output,
                name=request.name,
                trigger_words=request.trigger_words,
                base_model=request.base_model,
                allow_partial=request.allow_partial,
            )
            answer = await self._processes.run(job, take_room=take_room)
            async with self._write_lock:
                # Runs to its end even if the caller leaves, because a file without a row would be quarantined.
                record = await run_to_end(self._keep(request, output, answer.format, answer.trigger_phrase))
                return ImportedLora(record=record, family=answer.family, note=answer.note)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count an error of the block by its reason."""
        try:
            yield
        except BottegaError as error:
            self.imports.labels(error.reason_name.lower()).inc()
            raise

    def _spool(self) -> AbstractAsyncContextManager[Path]:
        """Return a context with a new file, which is deleted at the end unless it was renamed."""
        return acquired(self._files.spool, lambda spool: spool.unlink(missing_ok=True))

    def _room(self, size_bytes: int) -> AbstractAsyncContextManager[Reservation]:
        """Return a context with reserved disk space. Raises TooLarge, QueueFull, StorageUnavailable."""
        return acquired(lambda: self._files.room.reserve(size_bytes), self._files.room.release)

    async def _keep(self, request: ImportRequest, output: Path, kind: str, trigger: str) -> CatalogueRecord:
        digest, lora = await asyncio.to_thread(self._files.adopt, output)
        record = CatalogueRecord(
            name=request.name,
            digest=digest,
            base=request.base,
            rank=lora.rank,
            modules=lora.size,
            size_bytes=lora.file_bytes,
            text_bytes=lora.text_bytes,
            trigger_words=(lora.token,) if lora.token else request.trigger_words or ((trigger,) if trigger else ()),
            format=kind,
            token=lora.token,
            ignored=lora.ignored[:MAX_LISTED_IGNORED],
            added_s=time.time(),
        )
        try:
            kept = await self._catalogue.add(record, rewords=bool(request.trigger_words))
        except BottegaError:
            if not await self._catalogue.names(digest):
                await asyncio.to_thread(self._files.remove, digest)
            raise
        await asyncio.to_thread(self._files.describe, kept)
        self.imports.labels("added").inc()
        facts = {"lora": kept.name, "digest": digest, "base": kept.base, "rank": kept.rank, "modules": kept.modules}
        _log.info("a LoRA was added to the store", extra=facts)
        return kept

    def _check(self, request: ImportRequest) -> list[Violation]:
        violations = []
        if not rules.is_adapter_name(request.name):
            violations.append(Violation(field="name", description=f"must be {rules.ADAPTER_NAMES}"))
        if request.base not in self._bases:
            listed = ", ".join(sorted(self._bases)) or "none"
            violations.append(Violation(field="base", description=f"the store has these base models: {listed}"))
        if len(request.base_model) > rules.MAX_TRIGGER_CHARACTERS:
            rule = f"must have at most {rules.MAX_TRIGGER_CHARACTERS} characters"
            violations.append(Violation(field="base_model", description=rule))
        words = request.trigger_words
        if len(words) > _MAX_WORDS or not all(
            0 < len(w) <= rules.MAX_TRIGGER_CHARACTERS and w.isprintable() for w in words
        ):
            rule = f"must be at most {_MAX_WORDS}, each of 1 to {rules.MAX_TRIGGER_CHARACTERS} printable characters"
            violations.append(Violation(field="trigger_words", description=rule))
        return violations

    def _below_root(self, path: str) -> tuple[Path, int]:
        """Return the path with symlinks resolved, and the total bytes of the files that an import would read."""
        if self._root is None:
            raise _refused("this store does not register paths: its configuration has no imports.root")
        with _reading():
            source = resolved_below(Path(path), self._root)
            check_below(_imported(source), self._root)
        return source, self._measured(source)

    def _measured(self, source: Path) -> int:
        """Return the total bytes of the files that an import would read. Raises InvalidRequest, TooLarge."""
        with _reading():
            if source.is_dir():
                size_bytes = sum(file.stat().st_size for file in _imported(source))
            elif source.is_file():
                size_bytes = source.stat().st_size
            else:
                raise _refused("there is no such file or folder on the store's machine")
        if size_bytes > self._max_bytes:
            raise TooLarge(
                f"has {size_bytes} bytes; at most imports.max_bytes, {self._max_bytes}, are allowed",
                metadata={"limit": "max_bytes"},
            )
        return size_bytes


def _kept_bytes(size_bytes: int) -> int:
    """Return an upper bound on the canonical form's size for `size_bytes` of files, if no convolutions are folded."""
    return size_bytes + min(_MAX_HEADER_BYTES, _MIN_HEADER_BYTES + size_bytes)


def _imported(folder: Path) -> list[Path]:
    """Return the files of a folder that an import reads; [] if the path is not a folder."""
    return [file for pattern in _IMPORTED for file in folder.glob(pattern)]


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        with open_files.translated():
            yield
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise _refused(f"{error.filename} {error.strerror}" if error.filename else str(error.strerror)) from error
        raise _refused(f"the store cannot read it: {error.strerror}") from error


def _refused(rule: str) -> InvalidRequest:
    return InvalidRequest(f"path: {rule}", violations=[Violation(field="path", description=rule)])
