"""Moves files that the catalogue does not list into quarantine, and restores or deletes them for an operator.

Nothing else deletes files in quarantine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bottega import rules
from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import EMBEDDING_KIND, CanonicalLora, Module
from bottega.addons.loras.wire.module_parts import VECTORS
from bottega.background_tasks import run_to_end
from bottega.errors import BadLora, ConfigError, DataLoss, InvalidRequest, LoraNotFound, Violation
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.files import FolderScan
from bottega.loras.importing.base import Base, read_base
from bottega.loras.object_files import LoraFiles
from bottega.loras.quarantine import Quarantine, QuarantinedLora, is_id
from bottega.loras.records import MAX_LISTED_IGNORED, CatalogueRecord, description_stem
from bottega.storage import os_errors

if TYPE_CHECKING:  # psycopg is optional
    from bottega.loras.shared_catalogue import SharedCatalogue

_log = logging.getLogger(__name__)

# After a scan of all files, the next one waits so many times its duration.
_PAUSE_PER_SCAN = 10
# Number of digits of the digest in the name of a LoRA whose own name is unknown.
_NAME_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredLora:
    """A LoRA that was restored to the catalogue."""

    record: CatalogueRecord
    unknown: tuple[str, ...]
    """Properties that could not be restored, because its files do not contain them; in words."""


class LoraRecovery:
    """Makes files and catalogue agree after a loss, and serves the quarantine to operators."""

    def __init__(
        self, *, bases: Mapping[str, Path], catalogue: LoraCatalogue | SharedCatalogue, files: LoraFiles
    ) -> None:
        self._bases = bases
        self._catalogue = catalogue
        self._files = files
        self._write_lock = catalogue.write_lock
        # Held by calls that read whole files, so that many of them do not take all threads of the store.
        self._restoring = asyncio.Lock()
        self._next_scan_at = 0.0

    @property
    def quarantine(self) -> Quarantine:
        """The files that the catalogue does not list."""
        return self._files.quarantine

    async def reconcile(self) -> FolderScan:
        """Move files that the catalogue does not list into quarantine. Log them, and LoRAs whose files are missing.

        Raises StorageUnavailable, DataLoss.
        """
        began = time.monotonic()
        async with self._write_lock:
            records = await self._catalogue.all()
            scan = await run_to_end(asyncio.to_thread(self._files.reconcile, records))
        ended = time.monotonic()
        self._next_scan_at = ended + _PAUSE_PER_SCAN * (ended - began)
        quarantine = self.quarantine
        if scan.moved:
            what = f"{scan.moved} files that are not in the catalogue of LoRAs were moved into quarantine"
            facts = {"bytes": scan.moved_bytes, "folder": quarantine.place, "in_quarantine": len(quarantine)}
            _log.warning(
                f"{what}: bottega loras quarantine lists them, bottega loras rebuild restores them", extra=facts
            )
        for digest in scan.lost:
            names = [record.name for record in records if record.digest == digest]
            _log.error("the file of a LoRA is missing; upload the LoRA again", extra={"loras": names, "digest": digest})
        return scan

    async def page(self, *, size: int, after: str) -> list[QuarantinedLora]:
        """Return up to `size` LoRAs in quarantine sorted by ID, starting after the ID `after`.

        The first page begins with a scan of the store's files, unless there was one a moment ago.
        """
        if not after and time.monotonic() >= self._next_scan_at:
            await self.reconcile()
        with os_errors.translated():
            return await asyncio.to_thread(self._files.quarantine.page, size=size, after=after)

    async def restore(self, id: str, *, name: str = "", base: str = "") -> RestoredLora:
        """Restore a LoRA to the catalogue.

        Args:
            id: Its ID in quarantine.
            name: Its new name; "" means the one in its description.
            base: Its base model; "" means the one in its description, or the only one that it fits.

        Raises:
            InvalidRequest: An argument is invalid, or the base model is unknown and not given.
            LoraNotFound: Nothing in quarantine has the ID.
            LoraExists: Another LoRA has the name.
            DataLoss: The weights are damaged or missing.
            BadLora: The weights do not fit the base model.
            StorageUnavailable: The disk failed.
        """
        rules.refuse(list(self._check(id, name, base)))
        async with self._restoring:
            found = await asyncio.to_thread(self._find, id)
            lora = await asyncio.to_thread(self._read, found)
            if not base and found.record is None:
                base = await asyncio.to_thread(self._only_base, lora)
            elif base and (found.record is None or base != found.record.base):
                await asyncio.to_thread(self._check_fits, lora, base)
            async with self._write_lock:
                # Runs to its end even if the caller leaves, so that the change is complete.
                record = await run_to_end(self._restore(found, _record(found, lora, name=name, base=base)))
        facts = {"lora": record.name, "digest": record.digest, "base": record.base}
        _log.info("a LoRA was restored from quarantine", extra=facts)
        return RestoredLora(record=record, unknown=tuple(_unknown(found, name, lora)))

    async def discard(self, id: str) -> int:
        """Delete a LoRA in quarantine permanently, and return how many bytes that freed.

        Raises InvalidRequest, LoraNotFound, StorageUnavailable.
        """
        rules.refuse(list(self._check(id, "", "")))
        async with self._restoring, self._write_lock:
            digest = id.partition(".")[0]
            listed = await self._catalogue.names(digest)
            if id in {digest if listed else "", *(description_stem(digest, name) for name in listed)}:
                # Another store has restored or uploaded it since the last scan.
                raise LoraNotFound(f"nothing in quarantine has the ID {id}", metadata={"loras": id})
            with os_errors.translated():
                freed_bytes = await run_to_end(asyncio.to_thread(self._files.quarantine.discard, id))
        _log.warning("a LoRA in quarantine was deleted", extra={"id": id, "bytes": freed_bytes})
        return freed_bytes

    async def _restore(self, found: QuarantinedLora, record: CatalogueRecord) -> CatalogueRecord:
        # The row comes first: the next start brings its weights back from quarantine if this is interrupted.
        kept = await self._catalogue.add(record)
        if kept != record:
            kept = await self._catalogue.change(kept.name, lambda present: _merged(present, record))
        await asyncio.to_thread(self._files.bring_back, record.digest)
        await asyncio.to_thread(self._files.describe, kept)
        with os_errors.translated():
            await asyncio.to_thread(self._files.quarantine.forget, found.id)
        return kept

    def _find(self, id: str) -> QuarantinedLora:
        with os_errors.translated():
            return self._files.quarantine.find(id)

    def _read(self, found: QuarantinedLora) -> CanonicalLora:
        """Return the parsed header of the weights. Raises DataLoss if the weights are damaged or missing."""
        with os_errors.translated():
            try:
                with self._files.open_any(found.digest) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != found.digest:
                        raise _damaged(found, "damaged")
                    file.seek(0)
                    return canonical.read(file)
            except FileNotFoundError:
                raise _damaged(found, "gone") from None
            except BadLora as error:
                raise _damaged(found, f"of another version: {error.message}") from None

    def _only_base(self, lora: CanonicalLora) -> str:
        """Return the only base model that a LoRA fits. Raises InvalidRequest if it fits none or several."""
        fitting = [name for name in sorted(self._bases) if self._misfit(lora, name) is None]
        if len(fitting) == 1:
            return fitting[0]
        why = f"it fits {', '.join(fitting)}: name one" if fitting else "it fits none of the store's base models"
        rule = f"the LoRA's files do not name its base model, and {why}"
        raise InvalidRequest(f"base: {rule}", violations=[Violation(field="base", description=rule)])

    def _check_fits(self, lora: CanonicalLora, base: str) -> None:
        misfit = self._misfit(lora, base)
        if misfit is not None:
            raise BadLora(f"the LoRA does not fit {base}: {misfit}")

    def _misfit(self, lora: CanonicalLora, base: str) -> str | None:
        try:
            model = read_base(self._bases[base])
        except ConfigError as error:
            return error.message
        if lora.token:
            widths = {module.component: module.parts[VECTORS].shape[1] for module in lora.modules}
            return None if widths == model.token_widths else "it reads no embeddings, or vectors of other sizes"
        wrong = next((module for module in lora.modules if not _fits(module, model)), None)
        return None if wrong is None else f"the model has no {wrong.component}.{wrong.path}, or one of another shape"

    def _check(self, id: str, name: str, base: str) -> Iterator[Violation]:
        if not is_id(id):
            yield Violation(field="id", description="must be an ID from ListQuarantine")
        if name and not rules.is_adapter_name(name):
            yield Violation(field="name", description=f"must be empty, or {rules.ADAPTER_NAMES}")
        if base and base not in self._bases:
            listed = ", ".join(sorted(self._bases)) or "none"
            yield Violation(field="base", description=f"the store has these base models: {listed}")


def _record(found: QuarantinedLora, lora: CanonicalLora, *, name: str, base: str) -> CatalogueRecord:
    """Return the record of a restored LoRA, made from its header and its description, if it has one."""
    old = found.record
    return CatalogueRecord(
        name=name or (old.name if old else f"recovered-{found.digest[:_NAME_DIGITS]}"),
        digest=found.digest,
        base=base or (old.base if old else ""),
        rank=lora.rank,
        modules=lora.size,
        size_bytes=lora.file_bytes,
        text_bytes=lora.text_bytes,
        trigger_words=(lora.token,) if lora.token else old.trigger_words if old else (),
        format=EMBEDDING_KIND if lora.token else old.format if old else "",
        token=lora.token,
        ignored=lora.ignored[:MAX_LISTED_IGNORED],
        bounds=old.bounds if old and base in ("", old.base) else (),
        pinned=old.pinned if old else False,
        added_s=old.added_s if old else time.time(),
    )


def _merged(present: CatalogueRecord, restored: CatalogueRecord) -> CatalogueRecord:
    """Return the record of a LoRA that was uploaded again, with missing values from the restored one."""
    return replace(
        present,
        trigger_words=present.trigger_words or restored.trigger_words,
        bounds=present.bounds or restored.bounds,
        pinned=present.pinned or restored.pinned,
    )


def _unknown(found: QuarantinedLora, name: str, lora: CanonicalLora) -> Iterator[str]:
    if found.record is None:
        if not name:
            yield "its name"
        if not lora.token:
            yield from ("its format", "its trigger words", "its profile")
        yield "when it was added"


def _fits(module: Module, base: Base) -> bool:
    layer = base.find(module.component, module.path)
    return layer is not None and module.shape in {None, layer.shape} and module.outputs == layer.shape[0]


def _damaged(found: QuarantinedLora, how: str) -> DataLoss:
    name = found.record.name if found.record else found.digest[:_NAME_DIGITS]
    return DataLoss(f"the weights of {name} are {how}; upload the LoRA again", metadata={"loras": name})
