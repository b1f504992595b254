"""Where the templates of edits are: in the memory of workers, as they report, and in stores, as these last answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from bottega import kinds
from bottega.gateway.fleet.members import Member
from bottega.v1.activations_pb2 import TEMPLATE_TIER_DISK, TEMPLATE_TIER_MEMORY, PrefetchTemplatesResponse

# Templates that are remembered of stores; InstGenIE's largest user had a thousand for 34 million edits.
_MOST_TEMPLATES = 16_384
# Of a disk, where the store has measured nothing yet.
_DISK_BYTES_PER_S = 1e9
_STORED = frozenset({TEMPLATE_TIER_MEMORY, TEMPLATE_TIER_DISK})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTemplate:
    """A template in a store, of which this much was on the disk alone when it was asked for. asked_at: monotonic."""

    disk_bytes: int
    disk_bytes_per_s: float
    asked_at: float

    def disk_s(self, now: float) -> float:
        """Seconds until all of it is in the store's memory: it is being loaded since it was asked for."""
        return max(0.0, self.disk_bytes / self.disk_bytes_per_s - (now - self.asked_at))


class Residences:
    """By template, see JobRequest."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, dict[str, StoredTemplate]] = OrderedDict()
        self._of_worker: dict[str, frozenset[str]] = {}
        self._workers: dict[str, set[str]] = {}

    def workers_with(self, template: str) -> Set[str]:
        """Names of the workers that have it in their memory. Not to be changed."""
        return self._workers.get(template, frozenset())

    def stored(self, template: str, now: float) -> StoredTemplate | None:
        """As the store has it that would have it in memory first; None where no store has it."""
        found = self._stored.get(template)
        return min(found.values(), key=lambda stored: stored.disk_s(now)) if found else None

    def note_answer(self, store: str, answer: PrefetchTemplatesResponse, now: float) -> None:
        """A store was asked, and loads what it has. store: its address."""
        speed = answer.disk_bytes_per_s if answer.disk_bytes_per_s > 0 else _DISK_BYTES_PER_S
        for said in answer.templates:
            self._forget(store, said.source)
            if said.tier in _STORED:
                stored = StoredTemplate(disk_bytes=max(0, said.disk_bytes), disk_bytes_per_s=speed, asked_at=now)
                self._stored.setdefault(said.source, {})[store] = stored
                self._stored.move_to_end(said.source)
        while len(self._stored) > _MOST_TEMPLATES:
            self._stored.popitem(last=False)

    def note_worker(self, member: Member) -> None:
        """A worker has reported."""
        self._set_worker(member.name, member.hosts(kinds.ACTIVATIONS).digests)

    def forget_worker(self, name: str) -> None:
        """A worker is lost."""
        self._set_worker(name, frozenset())
        self._of_worker.pop(name, None)

    def forget_store(self, store: str) -> None:
        """A store is lost."""
        for template in list(self._stored):
            self._forget(store, template)

    def _set_worker(self, name: str, templates: frozenset[str]) -> None:
        before = self._of_worker.get(name, frozenset())
        self._of_worker[name] = templates
        for template in before - templates:
            self._workers[template].discard(name)
            if not self._workers[template]:
                del self._workers[template]
        for template in templates - before:
            self._workers.setdefault(template, set()).add(name)

    def _forget(self, store: str, template: str) -> None:
        known = self._stored.get(template)
        if known is not None and known.pop(store, None) is not None and not known:
            del self._stored[template]
