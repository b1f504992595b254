"""The approximate cache and the activation store as one kind of store, for what tests promise of both.

A record here is an entry with its latents, or a template with its sections. Records have names, which are numbers.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from bottega import kinds
from bottega.activations.store.store import ActivationStore
from bottega.cache.store.store import LatentStore
from tests.support import cached_latents, cached_latents_writer, stored_templates, stored_templates_writer

StoreT = TypeVar("StoreT", LatentStore, ActivationStore)


class StoreCase(abc.ABC, Generic[StoreT]):
    """What tests do with a store of one kind."""

    name: str
    service: str
    """Kind of the service that has such a store."""
    files: str
    """Name of its folder of files."""
    tables: tuple[str, str]
    """Names of the tables of records and of parts."""
    is_somebody_elses: str
    """Text of the refusal of another program's records."""
    damaged_profile: str
    """Text of the log for a damaged profile."""

    @abc.abstractmethod
    def new(self, folder: Path, **changed: Any) -> StoreT:
        """Return a store that was not started."""

    @abc.abstractmethod
    def record(self, store: StoreT, name: int) -> None:
        """Record something, and wait until it is written or dropped."""

    @abc.abstractmethod
    def keep(self, store: StoreT, name: int) -> None:
        """Record something that no later record evicts."""

    @abc.abstractmethod
    def serves(self, store: StoreT, name: int) -> bool:
        """Return whether the record is served; what is served must be what was recorded."""

    @abc.abstractmethod
    def may_record(self, store: StoreT) -> bool:
        """Return whether the store asks for something new to be recorded."""

    @abc.abstractmethod
    def set_profile(self, store: StoreT) -> None:
        """Set a profile."""

    @abc.abstractmethod
    def clear(self, store: StoreT) -> int:
        """Delete all records, and return how many."""

    @abc.abstractmethod
    def count(self, store: StoreT) -> int:
        """Return the number of records."""

    @abc.abstractmethod
    def orphan(self) -> str:
        """Return the name of a file that a store could have."""

    @property
    @abc.abstractmethod
    def files_per_record(self) -> int:
        """Number of files of a record."""

    @property
    def writer(self) -> str:
        """Module of a process that keeps such a store at work."""
        return f"tests.support.{self.name}_writer"

    @abc.abstractmethod
    def look_through(self, folder: Path) -> None:
        """Check everything in the folder of a writer that was killed."""

    @contextmanager
    def running(self, folder: Path, **changed: Any) -> Iterator[StoreT]:
        """Start a store that has read what is there, and close it after the block."""
        store = self.new(folder, **changed)
        store.start()
        try:
            store.flush(stored_templates.WAIT_S)
            yield store
        finally:
            store.close()

    def paths(self, folder: Path) -> list[Path]:
        """Return all complete files."""
        return sorted((folder / self.files).glob("??/*"))


class CacheCase(StoreCase[LatentStore]):
    """The approximate cache."""

    name = "cached_latents"
    service = kinds.CACHE
    files = "latents"
    tables = ("entries", "latents")
    is_somebody_elses = "not the records of cached latents"
    damaged_profile = "measure it again with bottega cache profile"
    files_per_record = 1 + len(cached_latents.RECORDED)

    def new(self, folder: Path, **changed: Any) -> LatentStore:
        return LatentStore(cached_latents.settings(folder, **changed))

    def record(self, store: LatentStore, name: int) -> None:
        cached_latents.record(store, cached_latents.vector(name), seed=name)
        store.flush(cached_latents.WAIT_S)

    def keep(self, store: LatentStore, name: int) -> None:
        self.record(store, name)

    def serves(self, store: LatentStore, name: int) -> bool:
        entries = [
            entry
            for entry in store.entries(cached_latents.MODEL, 1000)
            if entry.parameters.prompt == f"prompt {name}" and len(entry.steps) == len(cached_latents.RECORDED)
        ]
        if not entries:
            return False
        pins = cached_latents.pins(*((entries[0].entry, step) for step in cached_latents.RECORDED))
        answer = store.ask(pins, cached_latents.vector(name))
        for start, found in zip(answer.header.hits, answer.latents, strict=True):
            assert found.data == cached_latents.latent(name, start.step).data, "a latent is another"
        return len(answer.latents) == len(cached_latents.RECORDED)

    def may_record(self, store: LatentStore) -> bool:
        return store.ask(cached_latents.question(key="ef" * 32), cached_latents.vector(99)).header.record

    def set_profile(self, store: LatentStore) -> None:
        store.set_profile(cached_latents.profile())

    def clear(self, store: LatentStore) -> int:
        return store.clear()

    def count(self, store: LatentStore) -> int:
        return len(store.entries("", 10_000))

    def orphan(self) -> str:
        return f"{'ab' * 16}@5"

    def look_through(self, folder: Path) -> None:
        store = cached_latents_writer.store_of(folder)
        store.start()
        assert store.flush(cached_latents.WAIT_S)
        assert cached_latents_writer.look_through(store) > 0
        rows = {f"{entry.entry}@{step}" for entry in store.entries("", 10_000) for step in entry.steps}
        store.close()
        assert {path.name for path in self.paths(folder) if "@" in path.name} == rows


class ActivationCase(StoreCase[ActivationStore]):
    """The activation store."""

    name = "stored_templates"
    service = kinds.ACTIVATIONS
    files = "sections"
    tables = ("templates", "sections")
    is_somebody_elses = "not the records of templates"
    damaged_profile = "measure it again with `bottega templates profile`"
    files_per_record = 3 + 1

    def new(self, folder: Path, **changed: Any) -> ActivationStore:
        # Without a tier in memory, all that is served is read from the disk.
        return ActivationStore(stored_templates.settings_of(folder, **{"memory_budget_bytes": 0, **changed}))

    def record(self, store: ActivationStore, name: int) -> None:
        stored_templates.record(store, str(name))

    def keep(self, store: ActivationStore, name: int) -> None:
        self.record(store, name)
        store.pin("", True)

    def serves(self, store: ActivationStore, name: int) -> bool:
        sections = stored_templates.answer(store, str(name), would_record=False).sections
        if len(sections) != self.files_per_record - 1:
            return False
        for step, info in enumerate(sections):
            lease = store.fetch(info.digest)
            if lease.exception(stored_templates.WAIT_S) is not None:
                return False
            store.give_back(lease.result())
            expected = [bytes(tensor) for tensor in stored_templates.tensors_of(f"{name} {step}")]
            found = stored_templates.elements(stored_templates.read(store, info.digest)[0])
            assert found == expected, "a section is another"
        return True

    def may_record(self, store: ActivationStore) -> bool:
        return stored_templates.answer(store, "99").record

    def set_profile(self, store: ActivationStore) -> None:
        store.set_profile(stored_templates.block_profile())

    def clear(self, store: ActivationStore) -> int:
        return store.drop("")

    def count(self, store: ActivationStore) -> int:
        return store.statistics().templates

    def orphan(self) -> str:
        return "ab" * 32

    def look_through(self, folder: Path) -> None:
        store = stored_templates_writer.store_of(folder)
        store.start()
        assert store.flush(stored_templates.WAIT_S)
        stored_templates_writer.look_through(store, folder)
        store.close()


CASES: tuple[StoreCase[Any], ...] = (CacheCase(), ActivationCase())
