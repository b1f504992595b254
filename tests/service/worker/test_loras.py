"""A worker's LoRAs come over real links from a real store: right, once, late, damaged, never, or given up midway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from bottega import kinds
from bottega.addons.loras.engine import LoraHandle, LoraRef
from bottega.addons.loras.wire import canonical
from bottega.addons.loras.worker.addon import LoraCache
from bottega.addons.loras.worker.store_link import LoraLinkSettings
from bottega.errors import DataLoss, InternalError, LoraNotFound, NoLora
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.transport import LinkCounters, OfferSource
from bottega.v1 import lora_pb2 as pb
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.samples.lora_files import Part, delta, kohya, low_rank, save
from tests.support.offers import AskedOffers
from tests.support.running_loras import MODULE, PATIENCE_S, TEXT_MODULE, Running, config, lora_file, running
from tests.support.shared_loras import LARGE, SMALL, QueuedOffers, Shelf, canonical_file, shelf
from tests.support.waiting import wait_until

SLOW = LimitedLinksConfig(socket=None, bytes_per_s=50_000)


class _Worker:
    """A source as an engine has it."""

    def __init__(self, *, budget_bytes: int = 1 << 20, offers: OfferSource | None = None) -> None:
        self.offers = AskedOffers(kinds.LORAS)
        self.counters = LinkCounters()
        self.source = LoraCache(
            offers=offers or self.offers,
            device=torch.device("cpu"),
            dtype=torch.float32,
            budget_bytes=budget_bytes,
            settings=LoraLinkSettings(),
            counters=self.counters,
        )

    def know(self, *stores: Running) -> None:
        self.source.set_stores(
            [ServiceAddress(name=store.store.name, address=store.server.address) for store in stores]
        )

    def begin(self, lora: pb.StoredLora) -> LoraHandle:
        return self.source.begin(LoraRef(name=lora.name, digest=lora.digest))

    async def wait(self, handle: LoraHandle, seconds: float = PATIENCE_S) -> bool:
        """Whether it is ready by then. Raises its error."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while not handle.ready and loop.time() < ends:
            await asyncio.to_thread(self.source.settle, [handle], 0.1)
        return handle.ready

    def close(self) -> None:
        self.source.stop()


@pytest.fixture
def worker() -> Iterator[_Worker]:
    with contextlib.closing(_Worker()) as made:
        yield made


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "store") as made:
        yield made


async def test_layers_are_those_of_the_file(store: Running, worker: _Worker, tmp_path: Path) -> None:
    parts = {("unet", MODULE): Part(rank=3, alpha=1.5), ("text_encoder", TEXT_MODULE): Part(rank=2, alpha=8.0)}
    tensors, expected = kohya(parts)
    lora = await store.upload("a", save(tensors, tmp_path / "a.safetensors"))
    worker.know(store)
    handle = worker.begin(lora)
    assert await worker.wait(handle)
    assert handle.text_ready
    assert not handle.layers("text_encoder_2")
    for name, paths in (("unet", [MODULE]), ("text_encoder", [TEXT_MODULE])):
        layers = handle.layers(name)
        assert list(layers) == paths
        for path, layer in low_rank(layers).items():
            torch.testing.assert_close(delta(layer.down, layer.up, layer.scale), expected[f"{name}.{path}"])
    assert 0 < handle.load_s < PATIENCE_S


async def test_what_is_here_is_not_fetched_again(store: Running, worker: _Worker, tmp_path: Path) -> None:
    lora = await store.upload("a", lora_file(tmp_path))
    worker.know(store)
    first, second = worker.begin(lora), worker.begin(lora)
    assert await worker.wait(first)
    assert second.ready
    worker.source.close([first, second])
    assert worker.begin(lora).ready
    assert worker.source.resident == [lora.digest]
    received = worker.counters.snapshot().received.messages
    assert received == 2, "its head, and a piece"


async def test_what_a_prompt_waits_for_waits_for_no_other_lora(tmp_path: Path, worker: _Worker) -> None:
    """Of two LoRAs on a slow link both text parts are here before the rest of either is."""
    async with running(tmp_path / "store", config(links=SLOW)) as store:
        # The rest takes longer than this thread may have to wait for a core.
        parts = {("unet", MODULE): Part(rank=512, alpha=1.0), ("text_encoder", TEXT_MODULE): Part(rank=1, alpha=1.0)}
        loras = []
        for seed in range(2):
            tensors, _ = kohya(parts, seed=seed)
            loras.append(await store.upload(f"l{seed}", save(tensors, tmp_path / f"{seed}.safetensors")))
        worker.know(store)
        handles = [worker.begin(lora) for lora in loras]
        while not all(handle.text_ready for handle in handles):
            assert not any(handle.ready for handle in handles)
            await asyncio.to_thread(worker.source.settle, handles, 0.1)
        assert not any(handle.ready for handle in handles)
        assert all(TEXT_MODULE in handle.layers("text_encoder") for handle in handles)
        worker.source.close(handles)


async def test_a_lora_that_ends_in_the_middle_is_refused_and_others_come(tmp_path: Path, worker: _Worker) -> None:
    """Without room in memory a store sends straight from its disk, where somebody cuts the file short."""
    async with running(tmp_path / "store", config(budget_bytes=1, links=SLOW)) as store:
        cut = await store.upload("cut", lora_file(tmp_path, rank=256))
        good = await store.upload("good", lora_file(tmp_path, seed=1))
        (path,) = (tmp_path / "store" / "files").glob(f"??/{cut.digest}.safetensors")
        worker.know(store)
        handle = worker.begin(cut)
        while not handle.text_ready:
            await asyncio.to_thread(worker.source.settle, [handle], 0.1)
        with path.open("r+b") as file:
            file.truncate(cut.size_bytes // 2)
        other = worker.begin(good)
        with pytest.raises(InternalError, match="truncated"):
            await worker.wait(handle)
        assert await worker.wait(other)
        assert len(worker.offers.asked) == 1, "the link lives"


async def test_what_nobody_waits_for_stays_within_the_budget(store: Running, tmp_path: Path) -> None:
    loras = [await store.upload(f"l{seed}", lora_file(tmp_path, seed=seed)) for seed in range(3)]
    two_bytes = 2 * 2 * 2 * 96 * 4  # down and up of rank 2, 96 wide, float32
    with contextlib.closing(_Worker(budget_bytes=two_bytes)) as worker:
        worker.know(store)
        for lora in loras:
            handle = worker.begin(lora)
            assert await worker.wait(handle)
            worker.source.close([handle])
        assert worker.source.resident == [lora.digest for lora in loras[1:]]
        handle = worker.begin(loras[0])
        assert await worker.wait(handle)


async def test_a_digest_that_no_store_has_is_said_and_can_be_asked_for_again(
    store: Running, worker: _Worker, tmp_path: Path
) -> None:
    worker.know(store)
    lora = pb.StoredLora(name="a", digest="0" * 64)
    with pytest.raises(LoraNotFound, match="LoRA a: ") as caught:
        await worker.wait(worker.begin(lora))
    assert caught.value.metadata["loras"] == "a"
    lora = await store.upload("b", lora_file(tmp_path))
    assert await worker.wait(worker.begin(lora))


async def test_weights_of_another_digest_are_data_loss_and_others_undisturbed(tmp_path: Path, worker: _Worker) -> None:
    # Without room in memory a store sends straight from its disk, and checks nothing: the worker does.
    async with running(tmp_path / "store", config(budget_bytes=1)) as store:
        good = await store.upload("good", lora_file(tmp_path))
        bad = await store.upload("bad", lora_file(tmp_path, seed=1))
        files = tmp_path / "store" / "files"
        (source,) = files.glob(f"??/{good.digest}.safetensors")
        (target,) = files.glob(f"??/{bad.digest}.safetensors")
        target.write_bytes(source.read_bytes())
        worker.know(store)
        handles = [worker.begin(bad), worker.begin(good)]
        assert await worker.wait(handles[1])
        with pytest.raises(DataLoss, match="bad"):
            await worker.wait(handles[0])
        assert len(worker.offers.asked) == 1, "the link lives"


async def test_what_one_store_has_damaged_another_one_is_asked_for(tmp_path: Path, worker: _Worker) -> None:
    async with running(tmp_path / "one", config(budget_bytes=1)) as one, running(tmp_path / "two") as two:
        lora = await one.upload("a", lora_file(tmp_path))
        _damage(tmp_path / "one")
        worker.know(one, two)
        with pytest.raises(DataLoss):  # and not that the other one has not got it
            await worker.wait(worker.begin(lora))
        await two.upload("a", lora_file(tmp_path))
        assert await worker.wait(worker.begin(lora))


async def test_who_read_a_damaged_text_part_hears_so_though_another_store_sends_the_whole(
    tmp_path: Path, worker: _Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt that was encoded with it would be another picture's, whatever comes afterwards."""
    slow = config(budget_bytes=1, links=SLOW)
    parts = {("unet", MODULE): Part(rank=192, alpha=1.0), ("text_encoder", TEXT_MODULE): Part(rank=1, alpha=1.0)}
    path = save(kohya(parts)[0], tmp_path / "a.safetensors")
    async with running(tmp_path / "one", slow) as one, running(tmp_path / "two") as two:
        lora = await one.upload("a", path)
        await two.upload("a", path)
        _damage(tmp_path / "one", behind_bytes=lora.size_bytes - _denoiser_bytes(tmp_path / "one"))
        worker.know(one, two)
        reader, waiter = worker.begin(lora), worker.begin(lora)
        while not reader.text_ready:
            await asyncio.to_thread(worker.source.settle, [reader], 0.1)
        assert TEXT_MODULE in reader.layers("text_encoder")
        assert await worker.wait(waiter), "who had not read it gets the whole"
        with pytest.raises(NoLora, match="of a was damaged"):
            await worker.wait(reader)
        assert "a LoRA is damaged in its store; delete it and upload it again" in caplog.messages, (
            "its operator hears of it too"
        )
        assert await worker.wait(worker.begin(lora))


def _denoiser_bytes(store: Path) -> int:
    (path,) = (store / "files").glob("??/*.safetensors")
    with path.open("rb") as file:
        return canonical.read(file).denoiser_bytes


def _damage(store: Path, *, behind_bytes: int = 0) -> None:
    """Changes a bit of the last byte, or of the last of so many first ones."""
    (path,) = (store / "files").glob("??/*.safetensors")
    data = bytearray(path.read_bytes())
    data[(behind_bytes or len(data)) - 1] ^= 1
    path.write_bytes(data)


async def test_a_store_that_comes_back_elsewhere_is_found_by_those_who_wait(tmp_path: Path, worker: _Worker) -> None:
    folder = tmp_path / "store"
    async with running(folder) as store:
        lora = await store.upload("a", lora_file(tmp_path))
        first = store.server.address
        handle = worker.begin(lora)
        assert not await worker.wait(handle, 0.2), "as long as no store is known"
        worker.know(store)
        assert await worker.wait(handle)
        later = await store.upload("b", lora_file(tmp_path, seed=1))
    handle = worker.begin(later)
    assert not await worker.wait(handle, 0.5)
    async with running(folder) as store:
        assert store.server.address != first
        worker.know(store)
        assert await worker.wait(handle)


_STORE = ServiceAddress(name="s", address="s")
_MIDDLE = (64, 4096)  # some 4 MiB
_SLOW_BYTES_PER_S = 4 << 20


class _Impatient(_Worker):
    """A source that keeps nothing, and offers for its links that the test brings."""

    def __init__(self) -> None:
        self._brought = QueuedOffers()
        super().__init__(budget_bytes=1, offers=self._brought)
        self.source.set_stores([_STORE])

    def link_to(self, store: Shelf) -> None:
        """As another process of this host would be."""
        self._brought.brought.put(store.links.offer("w", "", caller=""))

    def ask(self, digest: str) -> LoraHandle:
        return self.source.begin(LoraRef(name="ink", digest=digest))

    @property
    def received_bytes(self) -> int:
        return self.counters.snapshot().received.size_bytes


@pytest.fixture
def impatient() -> Iterator[_Impatient]:
    with contextlib.closing(_Impatient()) as made:
        yield made


@pytest.mark.parametrize("unix", [True, False], ids=["in its memory", "in bytes"])
def test_what_was_closed_before_it_came_never_stays(tmp_path: Path, impatient: _Impatient, unix: bool) -> None:
    # Slowly, in bytes, so that what is given up is heard of before it has been sent, however busy the machine is.
    with shelf(tmp_path, unix=unix, bytes_per_s=0 if unix else 1 << 20) as store:
        impatient.link_to(store)
        linked, *digests = (store.put(canonical_file(SMALL, seed=seed)) for seed in range(14))
        first = impatient.ask(linked)
        wait_until(lambda: first.ready, "the LoRA")
        impatient.source.close([first])
        for digest in digests[:-1]:
            impatient.source.close([impatient.ask(digest)])
        last = impatient.ask(digests[-1])  # comes after all that was asked for before it
        wait_until(lambda: last.ready, "the last LoRA")
        wait_until(lambda: not any(map(store.tiers.leases, digests)), "the store to let all go")
        assert impatient.source.resident == digests[-1:]
        size_bytes = (tmp_path / digests[-1]).stat().st_size
        assert impatient.source.used_bytes <= size_bytes
        assert impatient.received_bytes < 8 * size_bytes, "of fourteen: the store has heard of it"
        impatient.source.close([last])
        assert (impatient.source.resident, impatient.source.used_bytes) == ([], 0)


def test_a_link_carries_no_more_of_what_is_given_up(tmp_path: Path, impatient: _Impatient) -> None:
    with shelf(tmp_path, unix=False, bytes_per_s=_SLOW_BYTES_PER_S) as store:
        impatient.link_to(store)
        file = canonical_file(LARGE)
        large, small = store.put(file), store.put(canonical_file(SMALL))
        handle = impatient.ask(large)
        wait_until(lambda: impatient.received_bytes > 1 << 20, "a MiB")
        assert (handle.text_ready, handle.ready) == (True, False)
        impatient.source.close([handle])
        wait_until(lambda: not store.tiers.leases(large), "the store to let it go")
        behind = impatient.ask(small)
        wait_until(lambda: behind.ready, "the LoRA behind it")
        assert impatient.received_bytes < len(file) // 4


def test_another_who_waits_for_the_same_still_gets_it(tmp_path: Path, impatient: _Impatient) -> None:
    with shelf(tmp_path, unix=False, bytes_per_s=_SLOW_BYTES_PER_S) as store:
        impatient.link_to(store)
        digest = store.put(canonical_file(_MIDDLE))
        one, two = impatient.ask(digest), impatient.ask(digest)
        wait_until(lambda: one.text_ready, "the LoRA's text")
        impatient.source.close([one])
        impatient.source.close([one])  # is harmless
        wait_until(lambda: two.ready, "the LoRA")
        assert impatient.received_bytes < 1.5 * (tmp_path / digest).stat().st_size, "once"


def test_who_asks_again_at_once_has_all_of_it_sent_anew(tmp_path: Path, impatient: _Impatient) -> None:
    """Pieces of the first answer that still come are none of the second's."""
    with shelf(tmp_path, unix=False, bytes_per_s=_SLOW_BYTES_PER_S) as store:
        impatient.link_to(store)
        digest = store.put(canonical_file(_MIDDLE))
        for _ in range(3):
            given_up = impatient.ask(digest)
            wait_until(lambda: given_up.text_ready, "the LoRA's text")  # noqa: B023 - is waited for here
            impatient.source.close([given_up])
        handle = impatient.ask(digest)
        wait_until(lambda: handle.ready, "the LoRA")
        assert len(handle.layers("unet")) == 4
        assert impatient.source.resident == [digest]
