"""A worker's look-ups at several caches, each a process of its own: one is killed, and one is added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.placement import placement_key
from bottega.addons.cache.worker import CacheLinkSettings, LatentStores
from bottega.addons.interface.store_link import rank_stores
from bottega.engine.spec import ResolvedSpec
from bottega.errors import Unavailable
from bottega.transport import LinkCounters, ServiceOffer, offer_from_wire
from bottega.v1 import cache_pb2 as pb
from bottega.v1.cache_pb2_grpc import CacheServiceStub
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.link_pb2 import OpenLinkRequest
from bottega.v1.link_pb2_grpc import LinkServiceStub
from tests.support.offers import OffersAtOnce
from tests.support.running_cache import KEY, MODEL_HASH, STEPS, profile, question
from tests.support.services import FREE_PORTS, Service, Services
from tests.support.waiting import EVENTUALLY_S, wait_until

_PROMPTS = 48
_WIDTH = 64


class _Offers(OffersAtOnce):
    """Offers of processes, which are asked over gRPC as a worker's front does."""

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        with grpc.insecure_channel(address) as channel:
            request = OpenLinkRequest(kind=kinds.CACHE, worker="w")
            try:
                response = LinkServiceStub(channel).OpenLink(request, timeout=EVENTUALLY_S)
            except grpc.RpcError as error:
                raise Unavailable(f"{address} does not answer") from error
        return ServiceOffer(offer=offer_from_wire(response.offer), service=address)


class _Caches:
    """Processes of caches, and a worker's links to them."""

    def __init__(self, services: Services, stores: LatentStores) -> None:
        self._services = services
        self.stores = stores
        self.running: dict[str, Service] = {}

    def start(self, *names: str) -> None:
        """Start caches, which reuse latents of equal prompts alone, and link them."""
        for name in names:
            settings = {"name": name, "gateway": "", "server": FREE_PORTS, "exploration": 0.0, "row_pictures": 1}
            service = self.running[name] = self._services.start("cache", {**settings, "min_free_bytes": 0}, name=name)
            with grpc.insecure_channel(service.address) as channel:
                request = pb.SetCacheProfileRequest(profile=profile(similarity=0.999))
                CacheServiceStub(channel).SetCacheProfile(request, timeout=EVENTUALLY_S)
        self.link()

    def kill(self, name: str) -> None:
        """Kill a cache. The worker's gateway has not noticed yet, but the link is lost."""
        self.running.pop(name).kill()
        wait_until(lambda: self.stores.linked == len(self.running), "the loss")

    def link(self) -> None:
        """Tell the worker who is there, as a gateway does."""
        there = [ServiceAddress(name=name, address=service.address) for name, service in self.running.items()]
        self.stores.set_stores(there)
        wait_until(lambda: self.stores.linked == len(there), "the links")

    def entries(self) -> int:
        found = 0
        for service in self.running.values():
            with grpc.insecure_channel(service.address) as channel:
                stats = CacheServiceStub(channel).GetCacheStats(pb.GetCacheStatsRequest(), timeout=EVENTUALLY_S)
                found += sum(model.entries for model in stats.models)
        return found

    def ask(self, embedding: Tensor, pinned: Sequence[pb.CacheStart] = ()) -> LatentReply:
        header = question(pinned=pinned)
        return self.stores.ask(LatentQuestion(header=header, embedding=embedding)).result(EVENTUALLY_S)

    def hits(self, embeddings: Sequence[Tensor]) -> list[bool]:
        return [bool(self.ask(embedding).latents) for embedding in embeddings]

    def owners(self, embeddings: Sequence[Tensor]) -> list[str]:
        return [rank_stores(self.running, placement_key(KEY, each.numpy()))[0] for each in embeddings]


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[_Caches]:
    with Services(tmp_path) as services, _stores() as stores:
        made = _Caches(services, stores)
        made.start("one", "two", "three")
        yield made


@contextmanager
def _stores() -> Iterator[LatentStores]:
    stores = LatentStores(
        model_name="m",
        offers=_Offers(),
        budget_bytes=64 << 20,
        settings=CacheLinkSettings(retry_s=0.1),
        counters=LinkCounters(),
    )
    try:
        yield stores
    finally:
        stores.stop()


def _recording(embedding: Tensor, seed: int) -> JobRecording:
    return JobRecording(
        key=KEY,
        model_hash=MODEL_HASH,
        spec=ResolvedSpec(prompt=f"prompt {seed}", negative_prompt="", seed=seed, width=64, height=64),
        embedding=embedding,
        pixels=torch.zeros(8, 8, 3, dtype=torch.uint8),
        latents={STEPS // 2: torch.full((4, 8, 8), float(seed))},
    )


def test_a_lost_cache_costs_its_share_and_a_new_one_takes_its_share(caches: _Caches) -> None:
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randn(_WIDTH, generator=chance) for _ in range(_PROMPTS)]
    assert not any(caches.hits(prompts))
    for seed, prompt in enumerate(prompts):
        assert caches.stores.record(_recording(prompt, seed))
    wait_until(lambda: caches.entries() == _PROMPTS, "the recordings")
    assert all(caches.hits(prompts)), "no hit is lost between caches that stay"

    first_owners = caches.owners(prompts)
    caches.kill("two")
    lost = [owner == "two" for owner in first_owners]
    assert 0.1 * _PROMPTS < sum(lost) < 0.6 * _PROMPTS
    assert caches.hits(prompts) == [not each for each in lost], "and no query fails"
    caches.link()
    for seed, prompt in enumerate(prompts):
        if lost[seed]:
            assert caches.stores.record(_recording(prompt, seed))
    wait_until(lambda: caches.entries() == _PROMPTS, "the recordings")
    assert all(caches.hits(prompts)), "others have taken over its share"

    before = caches.owners(prompts)
    pins = [caches.ask(prompt).header.hits[0] for prompt in prompts]
    caches.start("four")
    after = caches.owners(prompts)
    moved = [old != new for old, new in zip(before, after, strict=True)]
    assert 0.1 * _PROMPTS < sum(moved) < 0.6 * _PROMPTS
    assert {new for new, changed in zip(after, moved, strict=True) if changed} == {"four"}
    assert caches.hits(prompts) == [not each for each in moved]
    named = [caches.ask(prompt, [pin]).header.hits[0].entry for prompt, pin in zip(prompts, pins, strict=True)]
    assert named == [pin.entry for pin in pins], "an entry that is named is found where it was recorded"
