"""Files and records of a store on disk, with pending deletions and changes.

Files are written before their records and deleted after them. An interruption leaves either files without a record,
which the next start deletes, or records without files, which count as missing. Calls must come from one thread at a
time. They block on the disk and raise StorageUnavailable, or DataLoss for damaged records; they may be retried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from bottega.activations.disk.records import RecordChanges, TemplateRecords
from bottega.activations.disk.section_files import SectionFiles
from bottega.activations.template import SectionRecord, TemplateRecord

# After this many removed or replaced records, unused layouts and maps are deleted.
_STRAYS_AFTER = 1000


@dataclass(slots=True, kw_only=True)
class ActivationDisk:
    """The files and records of a store."""

    files: SectionFiles
    """May be read by other threads meanwhile."""
    records: TemplateRecords
    _changes: RecordChanges = field(default_factory=RecordChanges)
    _garbage: list[str] = field(default_factory=list)
    _gone: int = 0

    def open(self) -> bool:
        """Open or reopen the records. Return False if their database or the files were replaced since the last open."""
        was_in_place = self.records.in_place and self.files.in_place
        return self.records.open() and was_in_place

    def load(self) -> list[TemplateRecord]:
        """Return all templates, with the sections whose files exist. `tidy` deletes the rest."""
        self._changes, self._garbage = RecordChanges(), []
        sizes = self.files.open()
        templates, damaged = self.records.read()
        self._changes.templates.update(damaged)
        found = [template for template in templates if self._complete(template, sizes)]
        wanted = {digest for template in found for digest in template.files}
        self._garbage += sizes.keys() - wanted
        return found

    def discard(self, digests: Iterable[str]) -> None:
        """Delete these files with the next `tidy`."""
        self._garbage += digests

    def tidy(self, changes: RecordChanges) -> None:
        """Carry out pending deletions, and write changes."""
        self.make_room()
        self.write(changes)
        if self._gone >= _STRAYS_AFTER:
            self.drop_strays()

    def make_room(self) -> None:
        """Delete discarded files."""
        while self._garbage:
            self.files.remove(self._garbage[-1:])
            self._garbage.pop()

    def drop_strays(self) -> None:
        """Delete layouts, maps and sections that belong to no template."""
        self.records.drop_strays()
        self._gone = 0

    def write(
        self,
        changes: RecordChanges,
        *,
        added: Collection[TemplateRecord] = (),
        sections: Collection[tuple[int, SectionRecord]] = (),
    ) -> None:
        """Write new templates, new sections of known ones, and changes in one transaction. Their files must exist."""
        self._changes.add(changes)
        if added or sections or self._changes:
            self.records.write(self._changes, added=added, sections=sections)
            self._gone += len(self._changes.templates) + len(self._changes.sections) + len(sections)
            self._changes = RecordChanges()

    def _complete(self, template: TemplateRecord, sizes: dict[str, int]) -> bool:
        """Remove sections without files from a template, and return whether it is still usable."""
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
