"""On one host a worker and its store look at the same memory: no byte is copied, nothing leaks, nobody can spoil it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bottega.addons.loras.engine import LoraHandle, LoraRef
from bottega.addons.loras.wire import messages
from bottega.addons.loras.wire.messages import LoraMessageKind
from bottega.addons.loras.worker.addon import LoraCache
from bottega.addons.loras.worker.store_link import LoraLinkSettings
from bottega.errors import BadFrame, DataLoss
from bottega.transport import Backend, Deadline, Endpoints, Link, LinkCounters, LinkListener, SealedFile, kind_of
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.trace_pb2 import StoreTimes
from tests.support.link_peer import peers
from tests.support.shared_loras import (
    LARGE,
    PATIENCE_S,
    SMALL,
    QueuedOffers,
    Taker,
    canonical_file,
    layers_digest,
    shelf,
    taker,
)
from tests.support.transport_backends import open_descriptors, patience, sealed_file
from tests.support.waiting import wait_until

# Of a worker that fetches: messages, threads, what the interpreter takes.
_FEW_BYTES = 8 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[Taker]:
    with taker() as made:
        yield made


def test_a_worker_of_this_host_looks_at_the_stores_memory_and_has_no_copy(tmp_path: Path, worker: Taker) -> None:
    small, large = canonical_file(SMALL, seed=1), canonical_file(LARGE, seed=1)
    with shelf(tmp_path) as store:
        digest = store.put(small)
        first = worker.fetch(digest, store.links.offer("w", "", caller=""))  # has threads and buffers made
        assert first["layers"] == layers_digest(small)
        digest = store.put(large)
        got = worker.fetch(digest)
        assert got["layers"] == layers_digest(large)
        assert got["own_bytes"] < _FEW_BYTES < len(large) // 4
        assert got["shared_bytes"] > 0.99 * len(large)
        loan = store.tiers.borrow(digest).result(PATIENCE_S)
        assert os.fstat(loan.descriptor).st_ino in got["inodes"], "the same pages"
        store.tiers.give_back(loan)
        assert got["used_bytes"] > 0.99 * len(large), "they count in the worker's budget"
        sent = store.links.counters.snapshot().sent
        assert (sent.file_bytes, sent.size_bytes < 4096) == (len(small) + len(large), True)


def test_a_worker_elsewhere_is_sent_bytes(tmp_path: Path, worker: Taker) -> None:
    large = canonical_file(LARGE, seed=2)
    with shelf(tmp_path, unix=False) as store:
        got = worker.fetch(store.put(large), store.links.offer("w", "", caller=""))
        assert got["layers"] == layers_digest(large)
        assert got["own_bytes"] > 0.99 * len(large)
        assert got["shared_bytes"] < _FEW_BYTES
        sent = store.links.counters.snapshot().sent
        assert (sent.file_bytes, sent.size_bytes > len(large)) == (0, True)


def test_what_finds_no_room_in_memory_is_sent_from_the_disk_in_bytes(tmp_path: Path, worker: Taker) -> None:
    small = canonical_file(SMALL, seed=3)
    with shelf(tmp_path, budget_bytes=1) as store:
        got = worker.fetch(store.put(small), store.links.offer("w", "", caller=""))
        assert got["layers"] == layers_digest(small)
        assert store.links.counters.snapshot().sent.file_bytes == 0


def test_a_worker_keeps_what_its_store_lets_go_and_leaves(tmp_path: Path, worker: Taker) -> None:
    small = canonical_file(SMALL, seed=4)
    before = open_descriptors()
    with shelf(tmp_path) as store:
        digest = store.put(small)
        worker.fetch(digest, store.links.offer("w", "", caller=""))
        store.tiers.forget(digest)
        (tmp_path / digest).write_bytes(b"")
        assert store.tiers.used_bytes == 0
        assert worker.look(digest)["layers"] == layers_digest(small)
    assert open_descriptors() <= before
    assert worker.look(digest)["layers"] == layers_digest(small)


def test_workers_killed_while_they_fetch_leave_no_descriptor_in_the_store(tmp_path: Path) -> None:
    with shelf(tmp_path) as store, peers() as others:
        digest = store.put(canonical_file(SMALL))
        store.tiers.give_back(store.tiers.borrow(digest).result(PATIENCE_S))
        descriptors = []
        for number in range(6):
            sent = store.links.counters.snapshot().sent.file_bytes
            pid = others.start(f"fetch:{digest}", store.links.offer("w", "", caller=""), Backend.MEMFD)
            # Up to what its credit allows waits in its socket, unread.
            wait_until(lambda: store.links.counters.snapshot().sent.file_bytes > sent, "the file to be sent")  # noqa: B023 - called at once
            os.kill(pid, 9)
            wait_until(lambda: not store.links.handlers, "the links to end")
            assert store.tiers.leases(digest) == 0
            if number > 1:
                descriptors.append(open_descriptors())
        assert max(descriptors) <= descriptors[0]


class _Scripted:
    """A worker's source, and a store at the other end whose every word is the test's."""

    def __init__(self, folder: Path) -> None:
        self.listener = LinkListener(Endpoints(unix_path=folder / "links.sock"))
        self.offers = QueuedOffers()
        self.source = LoraCache(
            offers=self.offers,
            device=torch.device("cpu"),
            dtype=torch.float32,
            budget_bytes=1 << 20,
            settings=LoraLinkSettings(),
            counters=LinkCounters(),
        )
        self.source.set_stores([ServiceAddress(name="s", address="s")])

    def ask(self, digest: str) -> tuple[LoraHandle, Link]:
        """Has a LoRA fetched; the store's end of the link, with that fetch taken in."""
        offer = self.listener.offer()
        self.offers.brought.put(offer)
        handle = self.source.begin(LoraRef(name="ink", digest=digest))
        link = self.listener.accept(offer, patience())
        with link.recv(patience()) as incoming:
            incoming.wait_all(patience())
            assert kind_of(incoming.layout) == LoraMessageKind.FETCH
        return handle, link


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[_Scripted]:
    made = _Scripted(tmp_path)
    yield made
    made.source.stop()
    made.listener.close()


def _say_whole(link: Link, file: SealedFile | None, **times: float) -> None:
    whole = messages.whole_message(1, StoreTimes(**times))
    link.send(whole.layout, whole.buffers, patience(), file=file)


def _say_whole_and_hear(link: Link, file: SealedFile | None, **times: float) -> None:
    _say_whole(link, file, **times)
    link.recv(Deadline.after(PATIENCE_S))


def _settled(scripted: _Scripted, handle: LoraHandle) -> None:
    """Raises why it will never be here."""
    until_s = time.monotonic() + PATIENCE_S
    while not handle.ready:
        assert time.monotonic() < until_s
        scripted.source.settle([handle], 0.05)


@pytest.mark.parametrize("content", [b"x", b"\xff" * 5000, canonical_file(SMALL)[:-1]], ids=len)
def test_a_whole_lora_that_is_none_is_data_loss(scripted: _Scripted, content: bytes) -> None:
    handle, link = scripted.ask("0" * 64)
    with link, sealed_file(content) as file:
        _say_whole(link, file)
        with pytest.raises(DataLoss, match="the LoRA store sent a damaged LoRA"):
            _settled(scripted, handle)


@pytest.mark.parametrize(("has_file", "read_s"), [(False, 0.0), (True, -1.0)], ids=["no file", "no duration"])
def test_a_store_that_breaks_a_rule_about_whole_loras_is_lost(
    scripted: _Scripted, has_file: bool, read_s: float
) -> None:
    handle, link = scripted.ask("0" * 64)
    with link, sealed_file(canonical_file(SMALL)) as file, pytest.raises(BadFrame):
        _say_whole_and_hear(link, file if has_file else None, read_s=read_s)
    assert not handle.ready
