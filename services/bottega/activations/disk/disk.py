"""What a store has on the disk, files and records, and what is still to be deleted and noted there.

Files come before their records and go before them: whatever interrupts that leaves files without a record, which the
next start deletes, or a record without files, which counts as missing. One thread at a time calls it; its calls wait
for the disk and raise StorageUnavailable, or DataLoss for damaged records. After that they can be called again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from bottega.activations.disk.records import RecordChanges, TemplateRecords
from bottega.activations.disk.section_files import SectionFiles
from bottega.activations.template import SectionRecord, TemplateRecord

# Records that went or were replaced, after which is looked for layouts and maps that nothing has any more.
_STRAYS_AFTER = 1000


@dataclass(slots=True, kw_only=True)
class ActivationDisk:
    """files may be read by others meanwhile."""

    files: SectionFiles
    records: TemplateRecords
    _changes: RecordChanges = field(default_factory=RecordChanges)
    _garbage: list[str] = field(default_factory=list)
    _gone: int = 0

    def open(self) -> bool:
        """Opens the records, again or for the first time. Whether what is there is what was there."""
        was_in_place = self.records.in_place and self.files.in_place
        return self.records.open() and was_in_place

    def load(self) -> list[TemplateRecord]:
        """All templates, with those sections whose files are there. What is of no use goes with `tidy`."""
        self._changes, self._garbage = RecordChanges(), []
        sizes = self.files.open()
        templates, damaged = self.records.read()
        self._changes.templates.update(damaged)
        found = [template for template in templates if self._complete(template, sizes)]
        wanted = {digest for template in found for digest in template.files}
        self._garbage += sizes.keys() - wanted
        return found

    def discard(self, digests: Iterable[str]) -> None:
        """These files are deleted with the next `tidy`."""
        self._garbage += digests

    def tidy(self, changes: RecordChanges) -> None:
        """Deletes what is to be deleted, and notes what changed."""
        self.make_room()
        self.write(changes)
        if self._gone >= _STRAYS_AFTER:
            self.drop_strays()

    def make_room(self) -> None:
        """Deletes what is to be deleted of the files, so that others have room."""
        while self._garbage:
            self.files.remove(self._garbage[-1:])
            self._garbage.pop()

    def drop_strays(self) -> None:
        """Deletes records of nothing, as dropped templates leave them behind."""
        self.records.drop_strays()
        self._gone = 0

    def write(
        self,
        changes: RecordChanges,
        *,
        added: Collection[TemplateRecord] = (),
        sections: Collection[tuple[int, SectionRecord]] = (),
    ) -> None:
        """Notes templates, and sections of known ones, whose files are there, and what else changed: all or nothing."""
        self._changes.add(changes)
        if added or sections or self._changes:
            self.records.write(self._changes, added=added, sections=sections)
            self._gone += len(self._changes.templates) + len(self._changes.sections) + len(sections)
            self._changes = RecordChanges()

    def _complete(self, template: TemplateRecord, sizes: dict[str, int]) -> bool:
        """Takes what is missing out of it; whether there is anything left that can be used."""
        drawn = template.drawn
        there = {
            key: section
            for key, section in template.sections.items()
            if sizes.get(section.digest) == section.size_bytes
        }
        if not there or (drawn is not None and sizes.get(drawn.digest) != drawn.size_bytes):
            self._changes.templates.add(template.number)
            return False
        self._changes.sections |= {(template.number, key) for key in template.sections.keys() - there.keys()}
        template.set_sections(there)
        return True
