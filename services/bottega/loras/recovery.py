"""What the catalogue does not know is put into quarantine, and an operator brings it back from there or deletes it.

Nothing else deletes from quarantine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bottega import rules
from bottega.errors import BadLora, ConfigError, DataLoss, InvalidRequest, Violation
from bottega.lora import canonical
from bottega.lora.canonical import CanonicalLora, Module
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.files import FolderScan, LoraFolder
from bottega.loras.importing.base import Base, read_base
from bottega.loras.quarantine import QuarantinedLora, QuarantineFolder, is_id, is_intact
from bottega.loras.records import CatalogueRecord
from bottega.storage import os_errors
from bottega.storage.shielding import run_to_end

_log = logging.getLogger(__name__)

# After a look at all files there is no other one for so many times as long as it took.
_REST = 10
# Of a digest, in the name of a LoRA whose own is not known.
_NAME_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredLora:
    """unknown: what its files do not say, for people."""

    record: CatalogueRecord
    unknown: tuple[str, ...]


class LoraRecovery:
    """bases: by name, the folders of base models. write_lock: held while files and catalogue are changed together."""

    def __init__(
        self, *, bases: Mapping[str, Path], catalogue: LoraCatalogue, files: LoraFolder, write_lock: asyncio.Lock
    ) -> None:
        self._bases = bases
        self._catalogue = catalogue
        self._files = files
        self._write_lock = write_lock
        # Of what reads whole files, one at a time: a hundred requests for it must not take all of the store's threads.
        self._restoring = asyncio.Lock()
        self._look_again_at = 0.0

    @property
    def quarantine(self) -> QuarantineFolder:
        """Files that the catalogue does not know."""
        return self._files.quarantine

    async def sort_out(self) -> FolderScan:
        """Puts into quarantine what the catalogue does not know, says so in the log, and what is lost. Raises
        StorageUnavailable, DataLoss."""
        began = time.monotonic()
        async with self._write_lock:
            records = await self._catalogue.all()
            found = await run_to_end(asyncio.to_thread(self._files.sort_out, records))
        ended = time.monotonic()
        self._look_again_at = ended + _REST * (ended - began)
        quarantine = self.quarantine
        if found.moved:
            what = f"{found.moved} files that the catalogue of LoRAs does not know were put into quarantine"
            facts = {"bytes": found.moved_bytes, "folder": str(quarantine.folder), "in_quarantine": len(quarantine)}
            _log.warning(f"{what}: bottega loras quarantine lists, bottega loras rebuild brings back", extra=facts)
        for digest in found.lost:
            names = [record.name for record in records if record.digest == digest]
            _log.error("the file of a LoRA is gone; bring it again", extra={"loras": names, "digest": digest})
        return found

    async def page(self, *, size: int, after: str) -> list[QuarantinedLora]:
        """Up to `size` of what is in quarantine after that id, by id; for the first page the store looks at its files,
        unless it did so just now."""
        if not after and time.monotonic() >= self._look_again_at:
            await self.sort_out()
        with os_errors.translated():
            return await asyncio.to_thread(self._files.quarantine.page, size=size, after=after)

    async def restore(self, id: str, *, name: str = "", base: str = "") -> RestoredLora:
        """Brings a LoRA back into the catalogue. name, base: empty is what its description says.

        Raises InvalidRequest, also where the base is not known and does not follow; LoraNotFound, LoraExists, DataLoss
        for weights that are damaged or gone, BadLora for such as do not fit the base, StorageUnavailable.
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
                # A caller that goes meanwhile leaves nothing half done.
                record = await run_to_end(self._bring(found, _record(found, lora, name=name, base=base)))
        facts = {"lora": record.name, "digest": record.digest, "base": record.base}
        _log.info("a LoRA is back from quarantine", extra=facts)
        return RestoredLora(record=record, unknown=tuple(_unknown(found, name)))

    async def discard(self, id: str) -> int:
        """Deletes it for good; how many bytes became free. Raises InvalidRequest, LoraNotFound, StorageUnavailable."""
        rules.refuse(list(self._check(id, "", "")))
        async with self._restoring, self._write_lock:
            with os_errors.translated():
                freed_bytes = await run_to_end(asyncio.to_thread(self._files.quarantine.discard, id))
        _log.warning("a LoRA in quarantine is deleted", extra={"id": id, "bytes": freed_bytes})
        return freed_bytes

    async def _bring(self, found: QuarantinedLora, record: CatalogueRecord) -> CatalogueRecord:
        # First: a row without its weights finds them in quarantine at the next start; weights without a row stay there.
        kept = await self._catalogue.add(record)
        if kept != record:
            kept = await self._catalogue.change(kept.name, lambda there: _merged(there, record))
        await asyncio.to_thread(self._files.bring_back, record.digest)
        await asyncio.to_thread(self._files.describe, kept)
        with os_errors.translated():
            await asyncio.to_thread(self._files.quarantine.forget, found.id)
        return kept

    def _find(self, id: str) -> QuarantinedLora:
        with os_errors.translated():
            return self._files.quarantine.find(id)

    def _read(self, found: QuarantinedLora) -> CanonicalLora:
        """What its weights' header says. Raises DataLoss unless all of them are as they were."""
        quarantine, digest = self._files.quarantine, found.digest
        path = quarantine.weights(digest) if quarantine.has_weights(digest) else self._files.path(digest)
        with os_errors.translated():
            try:
                if not is_intact(path, digest):
                    raise _damaged(found, "damaged")
                with path.open("rb") as file:
                    return canonical.read(file)
            except FileNotFoundError:
                raise _damaged(found, "gone") from None
            except BadLora as error:
                raise _damaged(found, f"of another version: {error.message}") from None

    def _only_base(self, lora: CanonicalLora) -> str:
        """The one base model that it fits. Raises InvalidRequest."""
        fitting = [name for name in sorted(self._bases) if self._misfit(lora, name) is None]
        if len(fitting) == 1:
            return fitting[0]
        why = f"it fits {', '.join(fitting)}: say which" if fitting else "it fits none of the store's base models"
        rule = f"nothing says for which base model it is, and {why}"
        raise InvalidRequest(f"base: {rule}", violations=[Violation(field="base", description=rule)])

    def _check_fits(self, lora: CanonicalLora, base: str) -> None:
        misfit = self._misfit(lora, base)
        if misfit is not None:
            raise BadLora(f"it does not fit {base}: {misfit}")

    def _misfit(self, lora: CanonicalLora, base: str) -> str | None:
        try:
            model = read_base(self._bases[base])
        except ConfigError as error:
            return error.message
        wrong = next((module for module in lora.modules if not _fits(module, model)), None)
        return None if wrong is None else f"{wrong.component}.{wrong.path} is not there, or of another shape"

    def _check(self, id: str, name: str, base: str) -> Iterator[Violation]:
        if not is_id(id):
            yield Violation(field="id", description="must be an id as ListQuarantine says it")
        if name and not rules.is_adapter_name(name):
            yield Violation(field="name", description=f"must be empty, or {rules.ADAPTER_NAMES}")
        if base and base not in self._bases:
            listed = ", ".join(sorted(self._bases)) or "none"
            yield Violation(field="base", description=f"the store has these base models: {listed}")


def _record(found: QuarantinedLora, lora: CanonicalLora, *, name: str, base: str) -> CatalogueRecord:
    """What the catalogue will say: what the weights' header says, and the description where there is one."""
    said = found.record
    return CatalogueRecord(
        name=name or (said.name if said else f"recovered-{found.digest[:_NAME_DIGITS]}"),
        digest=found.digest,
        base=base or (said.base if said else ""),
        rank=lora.rank,
        modules=len(lora.modules),
        size_bytes=lora.file_bytes,
        text_bytes=lora.text_bytes,
        trigger_words=said.trigger_words if said else (),
        format=said.format if said else "",
        bounds=said.bounds if said and base in ("", said.base) else (),
        pinned=said.pinned if said else False,
        added_s=said.added_s if said else time.time(),
    )


def _merged(there: CatalogueRecord, back: CatalogueRecord) -> CatalogueRecord:
    """Of one that has been brought again meanwhile: what it lacks, the one from quarantine adds."""
    return replace(
        there,
        trigger_words=there.trigger_words or back.trigger_words,
        bounds=there.bounds or back.bounds,
        pinned=there.pinned or back.pinned,
    )


def _unknown(found: QuarantinedLora, name: str) -> Iterator[str]:
    if found.record is None:
        if not name:
            yield "its name"
        yield from ("its format", "its trigger words", "its profile", "when it was added")


def _fits(module: Module, base: Base) -> bool:
    there = base.find(module.component, module.path)
    return there is not None and there.shape == (module.up.shape[0], *module.down.shape[1:])


def _damaged(found: QuarantinedLora, how: str) -> DataLoss:
    name = found.record.name if found.record else found.digest[:_NAME_DIGITS]
    return DataLoss(f"the weights of {name} are {how}; bring the LoRA again", metadata={"loras": name})
