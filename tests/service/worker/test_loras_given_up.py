"""LoRAs that nobody waits for any more before they are here: no memory keeps them, no link carries them further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bottega.addons.loras.engine import LoraHandle, LoraRef
from bottega.addons.loras.worker.addon import LoraCache
from bottega.addons.loras.worker.store_link import LoraLinkSettings
from bottega.transport import LinkCounters
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.support.shared_loras import LARGE, SMALL, QueuedOffers, Shelf, canonical_file, shelf
from tests.support.waiting import wait_until

_STORE = ServiceAddress(name="s", address="s")
_MIDDLE = (64, 4096)  # some 4 MiB
_SLOW_BYTES_PER_S = 4 << 20


class _Worker:
    """A source, and offers for its links."""

    def __init__(self, *, budget_bytes: int = 1) -> None:
        self.counters = LinkCounters()
        self.offers = QueuedOffers()
        self.source = LoraCache(
            offers=self.offers,
            device=torch.device("cpu"),
            dtype=torch.float32,
            budget_bytes=budget_bytes,
            settings=LoraLinkSettings(),
            counters=self.counters,
        )
        self.source.set_stores([_STORE])

    def link_to(self, store: Shelf) -> None:
        """As another process of this host would be."""
        self.offers.brought.put(store.links.offer("w", "", caller=""))

    def begin(self, digest: str) -> LoraHandle:
        return self.source.begin(LoraRef(name="ink", digest=digest))

    @property
    def received_bytes(self) -> int:
        return self.counters.snapshot().received.size_bytes


@pytest.fixture
def worker() -> Iterator[_Worker]:
    made = _Worker()
    yield made
    made.source.stop()


@pytest.mark.parametrize("unix", [True, False], ids=["in its memory", "in bytes"])
def test_what_was_closed_before_it_came_never_stays(tmp_path: Path, worker: _Worker, unix: bool) -> None:
    # Slowly, in bytes, so that what is given up is heard of before it has been sent, however busy the machine is.
    with shelf(tmp_path, unix=unix, bytes_per_s=0 if unix else 1 << 20) as store:
        worker.link_to(store)
        linked, *digests = (store.put(canonical_file(SMALL, seed=seed)) for seed in range(14))
        first = worker.begin(linked)
        wait_until(lambda: first.ready, "the LoRA")
        worker.source.close([first])
        for digest in digests[:-1]:
            worker.source.close([worker.begin(digest)])
        last = worker.begin(digests[-1])  # comes after all that was asked for before it
        wait_until(lambda: last.ready, "the last LoRA")
        wait_until(lambda: not any(map(store.tiers.leases, digests)), "the store to let all go")
        assert worker.source.resident == digests[-1:]
        size_bytes = (tmp_path / digests[-1]).stat().st_size
        assert worker.source.used_bytes <= size_bytes
        assert worker.received_bytes < 8 * size_bytes, "of fourteen: the store has heard of it"
        worker.source.close([last])
        assert (worker.source.resident, worker.source.used_bytes) == ([], 0)


def test_a_link_carries_no_more_of_what_is_given_up(tmp_path: Path, worker: _Worker) -> None:
    with shelf(tmp_path, unix=False, bytes_per_s=_SLOW_BYTES_PER_S) as store:
        worker.link_to(store)
        file = canonical_file(LARGE)
        large, small = store.put(file), store.put(canonical_file(SMALL))
        handle = worker.begin(large)
        wait_until(lambda: worker.received_bytes > 1 << 20, "a MiB")
        assert (handle.text_ready, handle.ready) == (True, False)
        worker.source.close([handle])
        wait_until(lambda: not store.tiers.leases(large), "the store to let it go")
        behind = worker.begin(small)
        wait_until(lambda: behind.ready, "the LoRA behind it")
        assert worker.received_bytes < len(file) // 4


def test_another_who_waits_for_the_same_still_gets_it(tmp_path: Path, worker: _Worker) -> None:
    with shelf(tmp_path, unix=False, bytes_per_s=_SLOW_BYTES_PER_S) as store:
        worker.link_to(store)
        digest = store.put(canonical_file(_MIDDLE))
        one, two = worker.begin(digest), worker.begin(digest)
        wait_until(lambda: one.text_ready, "the LoRA's text")
        worker.source.close([one])
        worker.source.close([one])  # is harmless
        wait_until(lambda: two.ready, "the LoRA")
        assert worker.received_bytes < 1.5 * (tmp_path / digest).stat().st_size, "once"


def test_who_asks_again_at_once_has_all_of_it_sent_anew(tmp_path: Path, worker: _Worker) -> None:
    """Pieces of the first answer that still come are none of the second's."""
    with shelf(tmp_path, unix=False, bytes_per_s=_SLOW_BYTES_PER_S) as store:
        worker.link_to(store)
        digest = store.put(canonical_file(_MIDDLE))
        for _ in range(3):
            given_up = worker.begin(digest)
            wait_until(lambda: given_up.text_ready, "the LoRA's text")  # noqa: B023 - is waited for here
            worker.source.close([given_up])
        handle = worker.begin(digest)
        wait_until(lambda: handle.ready, "the LoRA")
        assert len(handle.layers("unet")) == 4
        assert worker.source.resident == [digest]
