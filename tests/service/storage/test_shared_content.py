"""Images in an object store that several gateways share: what one may delete, the local folder, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bottega.errors import DataLoss, StorageUnavailable, TooLarge
from bottega.storage import BlobFiles, ContentStore, SharedContentStore, shared_content
from bottega.storage.objects import ObjectStore, StoredObject, s3_location
from bottega.storage.s3 import S3Objects
from bottega.storage.shared_content import OBJECT_NAMES
from tests.fakes.fake_time import FakeTime
from tests.support import s3

MIB = 1 << 20


@dataclass(kw_only=True)
class Shared:
    """Objects that several gateways share, each with a folder of its own."""

    folder: Path
    new: Callable[[], ObjectStore]
    time: FakeTime

    @contextlib.asynccontextmanager
    async def gateway(
        self, name: str = "one", *, budget_bytes: int = 64 * MIB, local_bytes: int = 64 * MIB
    ) -> AsyncIterator[SharedContentStore]:
        local = ContentStore(self.folder / name, budget_bytes=local_bytes, ttl_s=3600, clock=self.time.clock())
        store = SharedContentStore(self.new(), local, budget_bytes=budget_bytes, ttl_s=3600)
        await store.open()
        await store.sweep()  # as the gateway does as soon as it serves
        try:
            yield store
        finally:
            await store.close()

    def objects(self) -> list[str]:
        return sorted(found.name for found in self.new().objects())

    def stored(self) -> set[str]:
        return {name[:64] for name in self.objects()}


@pytest.fixture(params=["folder", "nanio"])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_servers: s3.S3Servers
) -> Shared:
    if request.param == "folder":
        files = BlobFiles(tmp_path / "objects", names=OBJECT_NAMES)
        files.open()
        return Shared(folder=tmp_path, new=lambda: files, time=FakeTime())
    server = s3_servers.get("nanio")
    s3.set_environment(monkeypatch, server.url)
    location = s3_location(f"s3://{server.bucket()}/images")
    return Shared(folder=tmp_path, new=lambda: S3Objects(location, names=OBJECT_NAMES), time=FakeTime())


def _picture(number: int, size_bytes: int = 1000) -> tuple[str, bytes]:
    data = bytes([number]) * size_bytes
    return hashlib.sha256(data).hexdigest(), data


async def test_an_image_is_read_by_all_gateways_and_after_a_restart(shared: Shared) -> None:
    digest, data = _picture(1)
    async with shared.gateway("one") as one, shared.gateway("two") as two:
        await one.put(digest, data, owner="tenant", job="a")
        assert await two.get(digest) == data
        assert await one.get("0" * 64) is None
        assert await one.get("../secret") is None
    async with shared.gateway("one") as one:
        assert one.holds(digest)
        assert (await one.get(digest), one.size_bytes) == (data, 1000)
        async with await one.reader(digest) as reader:  # type: ignore[union-attr]
            assert [await reader.read(offset, 600) for offset in (0, 600)] == [data[:600], data[600:]]


async def test_the_local_folder_is_checked_and_healed(shared: Shared) -> None:
    digest, data = _picture(1)
    async with shared.gateway() as store:
        await store.put(digest, data)
        file = shared.folder / "one" / digest[:2] / digest
        file.write_bytes(b"damaged")
        assert await store.get(digest) == data
        assert file.read_bytes() == data
        file.unlink()
        assert await store.get(digest) == data
        assert file.read_bytes() == data


async def test_the_local_folder_is_bounded_and_the_objects_serve_the_rest(shared: Shared) -> None:
    pictures = [_picture(number) for number in range(6)]
    async with shared.gateway(local_bytes=2500) as store:
        for digest, data in pictures:
            await store.put(digest, data)
        local = [path for path in (shared.folder / "one").rglob("*") if path.is_file()]
        assert len(local) == 2
        assert [await store.get(digest) for digest, _ in pictures] == [data for _, data in pictures]
        large = _picture(9, 5000)  # larger than the folder may be
        await store.put(*large)
        assert await store.get(large[0]) == large[1]


async def test_a_full_local_disk_loses_no_image(shared: Shared) -> None:
    digest, data = _picture(1, 300_000)
    async with shared.gateway() as store:
        file = shared.folder / "one" / digest[:2]
        file.touch()  # in the way of the folder
        await store.put(digest, data)
        assert await store.get(digest) == data


async def test_damaged_objects_are_data_loss_until_they_are_put_again(shared: Shared) -> None:
    digest, data = _picture(1)
    async with shared.gateway("one") as one:
        await one.put(digest, data, job="a")
    shared.new().write(shared.objects()[0], data[:-1] + b"x")
    async with shared.gateway("two") as two:
        for _ in range(2):
            with pytest.raises(DataLoss):
                await two.get(digest)
        assert not await two.renew(digest, job="b")
        await two.put(digest, data, job="b")
        assert await two.get(digest) == data


async def test_the_deletion_of_a_job_takes_its_copy_and_no_other(shared: Shared) -> None:
    digest, data = _picture(1)
    async with shared.gateway("one") as one, shared.gateway("two") as two:
        await one.put(digest, data, owner="tenant", job="a")
        # The other gateway answers an identical request while this one deletes the first job.
        assert await two.renew(digest, owner="tenant", job="b")
        await one.release(digest, owner="tenant", job="a", put_before=one.steady())
        assert len(shared.objects()) == 1
        assert await two.get(digest) == data
        assert await one.get(digest) == data, "for the other job"
        await one.release(digest, owner="another", job="b", put_before=one.steady())
        assert len(shared.objects()) == 1
        await one.release(digest, owner="tenant", job="b", put_before=one.steady())
        assert shared.objects() == []
        shared.time.now += 61
        await two.sweep()
        assert await two.get(digest) is None, "also where it was read before"


async def test_a_renewal_and_a_deletion_at_the_same_time_lose_nothing(shared: Shared) -> None:
    async with shared.gateway("one") as one, shared.gateway("two") as two:
        for number in range(12):
            digest, data = _picture(number)
            await one.put(digest, data, owner="tenant", job=f"first {number}")
            renewed, _ = await asyncio.gather(
                two.renew(digest, owner="tenant", job=f"second {number}"),
                one.release(digest, owner="tenant", job=f"first {number}", put_before=one.steady()),
            )
            assert (await two.get(digest) == data) == renewed
            assert (digest in shared.stored()) == renewed


async def test_expired_copies_are_deleted_and_renewed_ones_stay(shared: Shared) -> None:
    kept, left = _picture(1), _picture(2)
    async with shared.gateway("one") as one, shared.gateway("two") as two:
        await one.put(*kept, job="a")
        await one.put(*left, job="b")
        shared.time.now += 3000
        assert await two.renew(kept[0], job="c")
        assert await two.renew(kept[0]), "without a job it only looks"
        shared.time.now += 700
        await one.sweep()
        assert await one.get(left[0]) is None
        assert not await one.renew(left[0], job="d")
        await two.sweep()
        assert await two.get(kept[0]) == kept[1]
        assert len(shared.objects()) == 1


async def test_the_owner_with_most_loses_its_oldest_on_all_gateways(shared: Shared) -> None:
    modest = [_picture(number) for number in range(3)]
    greedy = [_picture(number, 2000) for number in range(100, 108)]
    async with shared.gateway("one", budget_bytes=12_000) as one:
        for digest, data in modest:
            await one.put(digest, data, owner="modest", job=digest)
            shared.time.now += 1
        for digest, data in greedy[:5]:
            await one.put(digest, data, owner="greedy", job=digest)
            shared.time.now += 1
        assert shared.stored() == {digest for digest, _ in modest + greedy[1:5]}
        async with shared.gateway("two", budget_bytes=12_000) as two:
            shared.time.now += 100
            for digest, data in greedy[5:]:
                await two.put(digest, data, owner="greedy", job=digest)
            assert two.size_bytes <= 12_000
            assert {digest for digest, _ in modest} <= shared.stored()
        await one.sweep()
        assert (one.size_bytes, len(shared.objects())) == (11_000, 7)
        with pytest.raises(TooLarge):
            await one.put(*_picture(9, 12_001))


async def test_what_another_gateway_has_just_written_is_not_evicted(shared: Shared) -> None:
    async with shared.gateway("one", budget_bytes=3000) as one:
        for number in range(3):
            await one.put(*_picture(number), job=f"{number}")
        async with shared.gateway("two", budget_bytes=3000) as two:
            await two.put(*_picture(9), job="its own")
            assert len(shared.objects()) == 4, "the budget is exceeded, because their jobs may not be stored yet"
            shared.time.now += 61
            await two.sweep()
            assert len(shared.objects()) == 3
            assert two.holds(_picture(9)[0])


async def test_a_store_serves_before_its_objects_are_listed(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_content, "_PAGE", 2)
    pictures = [_picture(number) for number in range(5)]
    async with shared.gateway("one") as one:
        for digest, data in pictures:
            await one.put(digest, data, job=digest)
        losing = LosingObjects(shared.new())
        local = ContentStore(shared.folder / "two", budget_bytes=MIB, ttl_s=3600, clock=shared.time.clock())
        two = SharedContentStore(losing, local, budget_bytes=MIB, ttl_s=3600)
        await two.open()
        try:
            assert losing.listings == 0
            assert [await two.get(digest) for digest, _ in pictures] == [data for _, data in pictures]
            await two.put(*_picture(9), job="nine")
            assert await two.sweep(), "there are more pages"
            while await two.sweep():
                pass
            assert (losing.listings, len(two), two.size_bytes) == (1, 6, 6000)
        finally:
            await two.close()


async def test_pinned_images_are_not_evicted(shared: Shared) -> None:
    async with shared.gateway(budget_bytes=2000) as store:
        first, second, third = (_picture(number) for number in range(3))
        with store.pinned([first[0]]):
            for picture in (first, second, third):
                await store.put(*picture)
                shared.time.now += 1
            assert shared.stored() == {first[0], third[0]}


class LosingObjects:
    """Objects whose calls fail while `away`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.away = False
        self.listings = 0

    def _check(self) -> ObjectStore:
        if self.away:
            raise StorageUnavailable("S3 does not answer at http://10.1.2.3:9000", metadata={"cause": "ENOTCONN"})
        return self._store

    def probe(self) -> None:
        self._check().probe()

    def write(self, name: str, data: bytes) -> None:
        self._check().write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._check().create(name, data)

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        return self._check().read(name, digest=digest, size_bytes=size_bytes)

    def objects(self, start: str = "") -> Iterator[StoredObject]:
        self.listings += not start
        return self._check().objects(start)

    def remove(self, names: object) -> None:
        self._check().remove(names)  # type: ignore[arg-type]


async def test_while_the_objects_are_away_what_is_local_is_read(shared: Shared) -> None:
    digest, data = _picture(1)
    losing = LosingObjects(shared.new())
    new, shared.new = shared.new, lambda: losing
    async with shared.gateway() as store:
        await store.put(digest, data, job="a")
        losing.away = True
        assert await store.get(digest) == data
        for work in (
            store.put(*_picture(2), job="b"),
            store.get(_picture(3)[0]),
            store.release(digest, owner="", job="a", put_before=store.steady()),
            store.probe(),
        ):
            with pytest.raises(StorageUnavailable, match="the object storage cannot be used") as raised:
                await work
            assert "10.1.2.3" not in f"{raised.value.message}{raised.value.metadata}"
            assert "10.1.2.3" in str(raised.value.__cause__), "for the operator's log"
        shared.time.now += 4000
        with pytest.raises(StorageUnavailable):
            await store.sweep()
        losing.away = False
        await store.sweep()
        shared.new = new
        assert shared.objects() == []


async def test_a_closed_store_says_so_and_a_folder_has_one_gateway(shared: Shared) -> None:
    async with shared.gateway("one") as one:
        with pytest.raises(StorageUnavailable, match="another process"):
            async with shared.gateway("one"):
                pass
        await one.close()
        with pytest.raises(StorageUnavailable, match="closed"):
            await one.put(*_picture(1))


async def test_many_at_once_do_not_get_in_each_others_way(shared: Shared) -> None:
    pictures = [(hashlib.sha256(data).hexdigest(), data) for data in (os.urandom(2000) for _ in range(10))]
    async with shared.gateway(budget_bytes=15_000) as store:

        async def churn(number: int, digest: str, data: bytes) -> None:
            for turn in range(2):
                await store.put(digest, data, owner=f"{number % 3}", job=f"{number} {turn}")
                assert await store.get(digest) in (data, None)
                await store.sweep()

        await asyncio.gather(*(churn(number, *picture) for number, picture in enumerate(pictures)))
        await store.sweep()
        assert store.size_bytes == 2000 * len(shared.objects()) <= 15_000
