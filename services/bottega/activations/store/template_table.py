"""The table of stored templates: their content, uses, and order of eviction.

Changes must also be written to disk: `take_changes` returns them. Any thread may call it, and no call waits long,
because the table accesses neither the disk nor sections in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bottega.activations.records import SectionRecord, TemplateRecord, TemplateUse, section_place, use_values
from bottega.blobstore.records import RecordChanges
from bottega.caching.lru_cache import LruCache
from bottega.caching.tiers import KnownFile


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTotals:
    """Totals over all templates."""

    templates: int
    sections: int
    pinned: int
    size_bytes: int


class TemplateTable:
    """The templates of a store, within a budget for all their files."""

    def __init__(self, *, budget_bytes: int, max_templates: int, now: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._now = now
        self._evicted: list[TemplateRecord] = []
        self._templates: LruCache[TemplateRecord] = LruCache(
            budget_bytes=budget_bytes,
            max_entries=max_templates,
            on_evict=lambda _, template: self._evicted.append(template),
        )
        self._by_source: dict[str, set[str]] = {}
        # The template's key by digest of each file; templates have no files in common.
        self._key_of: dict[str, str] = {}
        self._changes = RecordChanges()

    def find(self, key: str, recording: str = "") -> TemplateRecord | None:
        """Return a template and count the use, or None. `recording` is the only acceptable recording ID; "" is any."""
        with self._lock:
            found = self._templates.get(key)
            if found is None or recording not in ("", found.recording):
                return None
            self._templates.use(key)
            self._note_use(found, replace(found.use, uses=found.use.uses + 1, used_s=self._now()))
            return found

    def get(self, key: str) -> TemplateRecord | None:
        """Return a template without counting a use, or None."""
        with self._lock:
            return self._templates.get(key)

    def section(self, digest: str) -> SectionRecord | None:
        """Return the section whose file has this digest, or None."""
        with self._lock:
            template = self._template_of(digest)
            return _section_of(template, digest) if template is not None else None

    def file(self, digest: str) -> KnownFile | None:
        """Describe the file of a section for the memory cache, which groups files by template; None if unknown."""
        with self._lock:
            template = self._template_of(digest)
            section = _section_of(template, digest) if template is not None else None
            if template is None or section is None:
                return None
            return KnownFile(size_bytes=section.size_bytes, group=template.key)

    @property
    def pinned(self) -> frozenset[str]:
        """Keys of templates that must not be evicted. Needs no lock."""
        return self._templates.pinned

    def newest(self, limit: int | None = None) -> list[TemplateRecord]:
        """Return templates, most recently used first."""
        with self._lock:
            return self._all()[::-1][:limit]

    def matching(self, prefix: str) -> list[TemplateRecord]:
        """Return templates whose IDs begin with `prefix`, most recently used first."""
        return [template for template in self.newest() if template.recording.startswith(prefix)]

    def expect(self, source: str, is_own: Callable[[str], bool] = lambda key: True) -> list[TemplateRecord]:
        """Return the templates of a source, most recently used first, and count the first one as used now.

        Workers that have it in their own memory do not ask for it, but it should still be evicted late.

        Args:
            is_own: Tells whether a template, given by its key, belongs to this store; others are left out.
        """
        with self._lock:
            found = (self._templates.get(key) for key in self._by_source.get(source, ()) if is_own(key))
            there = [template for template in found if template is not None]
            there.sort(key=lambda template: template.use.used_s, reverse=True)
            for template in there[:1]:
                self._templates.use(template.key)
                self._note_use(template, replace(template.use, used_s=self._now()))
            return there

    def add(self, template: TemplateRecord) -> None:
        """Add a template that was written to disk. Its key must be new."""
        with self._lock:
            self._templates.add(template.key, template)
            self._index(template)
            if template.use.pinned:
                self._templates.pinned |= {template.key}

    def replace(self, number: int, key: str, section: SectionRecord) -> list[str] | None:
        """Add a section that is on disk. Return the digests that it replaced, or None without its template."""
        with self._lock:
            template = self._templates.get(key)
            if template is None or template.number != number:
                return None
            before = template.sections.get(section.key)
            template.set_sections({**template.sections, section.key: section})
            self._index(template, gone=before)
            return [before.digest] if before is not None else []

    def strike(self, number: int) -> None:
        """Mark the rows of a template for deletion."""
        with self._lock:
            self._changes.gone.add(number)

    def lose(self, digest: str) -> list[str]:
        """Remove the sections that use a damaged file. Return the digests of all released files, once for each use.

        The whole template is removed if no section is left, or if the file contained its image latent and noise.
        """
        with self._lock:
            template = self._template_of(digest)
            if template is None:
                return []
            lost = {key: each for key, each in template.sections.items() if each.digest == digest}
            if len(lost) == len(template.sections) or (template.drawn is not None and template.drawn.digest == digest):
                self._forget(self._templates.remove(template.key))
                return template.files
            template.set_sections({key: each for key, each in template.sections.items() if key not in lost})
            self._changes.gone_parts |= {section_place(template.number, key) for key in lost}
            self._key_of.pop(digest, None)
            return [digest] * len(lost)

    def make_room(self, size_bytes: int, *, but: str = "") -> list[TemplateRecord] | None:
        """Evict templates until so many more bytes, and one more template, are within the budget. Return them.

        If that is impossible, evict none and return None. The template with key `but` stays.
        """
        return self._evict(lambda: self._templates.make_room(size_bytes), but)

    def free(self, size_bytes: int, *, but: str = "") -> list[TemplateRecord] | None:
        """Evict templates of so many bytes, although they are within the budget. Return them.

        If that is impossible, evict none and return None. The template with key `but` stays.
        """
        return self._evict(lambda: self._templates.free(size_bytes), but)

    def drop(self, prefix: str) -> list[TemplateRecord]:
        """Remove templates whose IDs begin with `prefix`, and return them."""
        with self._lock:
            gone = [each for each in self._all() if each.recording.startswith(prefix)]
            for template in gone:
                self._templates.remove(template.key)
                self._forget(template)
            return gone

    def pin(self, prefix: str, *, pinned: bool) -> int:
        """Pin or unpin templates whose IDs begin with `prefix`, and return how many."""
        with self._lock:
            found = [each for each in self._all() if each.recording.startswith(prefix)]
            for template in found:
                self._note_use(template, replace(template.use, pinned=pinned))
            keys = frozenset(template.key for template in found)
            self._templates.pinned = self._templates.pinned | keys if pinned else self._templates.pinned - keys
            return len(found)

    def totals(self) -> TableTotals:
        found = self.newest()
        return TableTotals(
            templates=len(found),
            sections=sum(len(template.sections) for template in found),
            pinned=sum(template.use.pinned for template in found),
            size_bytes=sum(template.size_bytes for template in found),
        )

    def take_changes(self) -> RecordChanges:
        """Return and clear the changes that have to be written."""
        with self._lock:
            taken, self._changes = self._changes, RecordChanges()
            return taken

    def _evict(self, evict: Callable[[], int | None], but: str) -> list[TemplateRecord] | None:
        """Evict and return templates; return None if that is impossible."""
        with self._lock:
            pinned = self._templates.pinned
            self._templates.pinned = pinned | {but}
            try:
                found = evict()
            finally:
                self._templates.pinned = pinned
            gone, self._evicted[:] = list(self._evicted), []
            for template in gone:
                self._forget(template)
            return None if found is None else gone

    def _note_use(self, template: TemplateRecord, use: TemplateUse) -> None:
        """Set the use of a template. Requires the lock."""
        template.use = use
        self._changes.uses[template.number] = use_values(use)

    def _all(self) -> list[TemplateRecord]:
        return [kept[1] for kept in self._templates.items()]

    def _template_of(self, digest: str) -> TemplateRecord | None:
        key = self._key_of.get(digest)
        return self._templates.get(key) if key is not None else None

    def _index(self, template: TemplateRecord, gone: SectionRecord | None = None) -> None:
        """Update the lookups by file and source. Requires the lock."""
        digests = template.files
        if gone is not None and gone.digest not in digests:
            self._key_of.pop(gone.digest, None)
        self._key_of.update(dict.fromkeys(digests, template.key))
        if template.header.source:
            self._by_source.setdefault(template.header.source, set()).add(template.key)

    def _forget(self, template: TemplateRecord | None) -> None:
        """Clean up after a template that was removed from the cache. Requires the lock."""
        assert template is not None, "the caller must have found the template"
        self._templates.pinned -= {template.key}
        for digest in template.files:
            self._key_of.pop(digest, None)
        keys = self._by_source.get(template.header.source, set())
        keys.discard(template.key)
        if not keys:
            self._by_source.pop(template.header.source, None)
        self._changes.uses.pop(template.number, None)
        self._changes.gone.add(template.number)


def _section_of(template: TemplateRecord, digest: str) -> SectionRecord | None:
    return next((each for each in template.sections.values() if each.digest == digest), None)


def files_of(templates: Iterable[TemplateRecord]) -> Sequence[str]:
    """Return the digests of all files of these templates, once for each use."""
    return [digest for template in templates for digest in template.files]
