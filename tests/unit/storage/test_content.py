"""The content store: what it keeps, what it drops, and what it does on disks that are full, forbidden or damaged."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from bottega.errors import DataLoss, StorageUnavailable, TooLarge
from bottega.storage import ContentStore, content
from tests.fakes.fake_time import FakeTime
from tests.support import full_disk

MIB = 1 << 20


@contextlib.asynccontextmanager
async def _store(
    folder: Path, *, budget_bytes: int = 64 * MIB, ttl_s: float = 60, clock: FakeTime | None = None
) -> AsyncIterator[ContentStore]:
    store = ContentStore(folder, budget_bytes=budget_bytes, ttl_s=ttl_s, clock=(clock or FakeTime()).clock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _named(data: bytes) -> tuple[str, bytes]:
    return hashlib.sha256(data).hexdigest(), data


def _picture(number: int, size_bytes: int = 1000) -> tuple[str, bytes]:
    return _named(bytes([number]) * size_bytes)


def _file(folder: Path, digest: str) -> Path:
    return folder / digest[:2] / digest


async def _swept(store: ContentStore) -> None:
    """Sweeps until there is no more to drop: on a busy machine one slice may be too short for a single file."""
    while await store.sweep():
        pass


def _everything(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def test_an_image_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    digest, data = _picture(1)
    async with _store(tmp_path / "deep" / "results") as store:
        await store.put(digest, data)
        assert await store.get(digest) == data
        assert await store.get("0" * 64) is None
        assert await store.get("../secret") is None
    async with _store(tmp_path / "deep" / "results") as store:
        assert await store.get(digest) == data
        assert (len(store), store.size_bytes) == (1, len(data))


async def test_a_reader_gives_parts_and_survives_the_removal_of_its_image(tmp_path: Path) -> None:
    clock = FakeTime()
    digest, data = _named(os.urandom(5000))
    async with _store(tmp_path, clock=clock) as store:
        await store.put(digest, data)
        reader = await store.reader(digest)
        assert reader is not None
        async with reader:
            assert reader.size_bytes == 5000
            clock.now += 61
            await _swept(store)
            assert _everything(tmp_path) == set()
            parts = [await reader.read(offset, 2000) for offset in (0, 2000, 4000, 6000)]
        assert b"".join(parts) == data
        assert await store.reader(digest) is None


async def test_the_same_image_again_is_renewed_and_not_written(tmp_path: Path) -> None:
    clock = FakeTime()
    digest, data = _picture(1)
    async with _store(tmp_path, clock=clock) as store:
        await store.put(digest, data)
        inode = _file(tmp_path, digest).stat().st_ino
        clock.now += 40
        await store.put(digest, data)
        assert _file(tmp_path, digest).stat().st_ino == inode
        assert store.size_bytes == len(data)
        clock.now += 40
        await store.sweep()
        assert await store.get(digest) == data
    async with _store(tmp_path, clock=clock) as store:  # the new time outlives the process
        await store.put(digest, data)
        assert _file(tmp_path, digest).stat().st_ino == inode
        clock.now += 61
        assert await store.get(digest) is None


async def test_the_oldest_go_when_the_budget_is_used_up(tmp_path: Path) -> None:
    clock = FakeTime()
    async with _store(tmp_path, budget_bytes=3500, clock=clock) as store:
        for number in range(5):
            clock.now += 1
            await store.put(*_picture(number))
            assert store.size_bytes <= 3500
        kept = [await store.get(_picture(number)[0]) is not None for number in range(5)]
        assert kept == [False, False, True, True, True]
        assert await store.renew(_picture(2)[0])
        await store.put(*_picture(5))
        assert [store.holds(_picture(number)[0]) for number in range(2, 6)] == [True, False, True, True]
        with pytest.raises(TooLarge):
            await store.put(*_picture(9, 3501))
    async with _store(tmp_path, budget_bytes=1500, clock=clock) as store:  # the operator gave it less
        await _swept(store)
        assert _everything(tmp_path) == {_picture(5)[0]}


async def test_images_that_belong_together_do_not_go_for_another_while_they_are_put(tmp_path: Path) -> None:
    first, older, newer = (_picture(number, 40) for number in (1, 2, 3))
    async with _store(tmp_path, budget_bytes=100) as store:
        with store.pinned([first[0]]):
            for picture in (first, older, newer):
                await store.put(*picture)
            assert [store.holds(digest) for digest, _ in (first, older, newer)] == [True, False, True]
        await store.put(*older)
        assert [store.holds(digest) for digest, _ in (first, older, newer)] == [False, True, True]


async def test_sweeping_many_is_done_in_slices_of_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_SLICE_S", content._SLICE_S / 10)
    clock = FakeTime()
    for number in range(600):
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        _file(tmp_path, digest).parent.mkdir(exist_ok=True)
        _file(tmp_path, digest).touch()
        os.utime(_file(tmp_path, digest), (clock.clock().wall(),) * 2)
    async with _store(tmp_path, clock=clock) as store:
        assert len(store) == 600
        clock.now += 61
        slices, left = 0, len(store)
        while await store.sweep():
            slices += 1
            assert len(store) < left, "a slice that drops nothing never ends"
            left = len(store)
        assert slices > 3
        assert _everything(tmp_path) == set()


async def test_what_was_interrupted_goes_and_what_is_foreign_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest, data = _picture(1)
    async with _store(tmp_path) as store:
        await store.put(digest, data)
    (tmp_path / "incoming" / ("f" * 64)).write_bytes(b"half")
    (tmp_path / "README").write_bytes(b"of an operator")
    (tmp_path / digest[:2] / "notes").write_bytes(b"too")
    (tmp_path / digest[:2] / ("f" * 64)).write_bytes(b"in the wrong place")
    (tmp_path / digest[:2] / (digest[:2] + "0" * 62)).symlink_to("/etc/passwd")
    with caplog.at_level(logging.WARNING):
        async with _store(tmp_path) as store:
            assert len(store) == 1
            assert await store.get(digest[:2] + "0" * 62) is None
    assert not list((tmp_path / "incoming").iterdir())
    assert {"README", "notes", "f" * 64} <= _everything(tmp_path)
    assert len(caplog.records) == 1


def _damages(file: Path) -> list[Callable[[], object]]:
    data = file.read_bytes()
    changed = [b"x" + data[1:], data[:-1], data + b"x", b""]
    return [*(partial(file.write_bytes, other) for other in changed), file.unlink]


@pytest.mark.parametrize("restart", [False, True])
async def test_a_damaged_image_is_data_loss_until_it_is_put_again(tmp_path: Path, restart: bool) -> None:
    digest, data = _picture(1)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(_store(tmp_path))
        await store.put(digest, data)
        for damage in _damages(_file(tmp_path, digest)):
            damage()
            if restart:
                await store.close()
                store = await stack.enter_async_context(_store(tmp_path))
            if restart and not _file(tmp_path, digest).exists():
                assert await store.get(digest) is None
            else:
                for _ in range(2):
                    with pytest.raises(DataLoss) as raised:
                        await store.get(digest)
                    assert str(tmp_path) not in raised.value.message
            assert not store.holds(digest)
            await store.put(digest, data)
            assert store.holds(digest)
            assert await store.get(digest) == data
            assert (store.size_bytes, len(store)) == (len(data), 1)


async def test_putting_an_image_again_heals_one_that_nobody_has_seen_shrink_or_go(tmp_path: Path) -> None:
    digest, data = _picture(1)
    async with _store(tmp_path) as store:
        for hurt in (lambda file: os.truncate(file, 10), Path.unlink):
            await store.put(digest, data)
            hurt(_file(tmp_path, digest))
            await store.put(digest, data)
            assert await store.get(digest) == data


async def test_an_image_that_shrinks_while_it_is_read_is_data_loss(tmp_path: Path) -> None:
    digest, data = _picture(1)
    async with _store(tmp_path) as store:
        await store.put(digest, data)
        reader = await store.reader(digest)
        assert reader is not None
        async with reader:
            os.truncate(_file(tmp_path, digest), 500)
            with pytest.raises(DataLoss):
                await reader.read(400, 200)


async def test_a_full_disk_is_said_leaves_nothing_half_written_and_heals(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=2 * MIB) as disk:
        async with _store(disk / "results") as store:
            kept, more = _picture(1, MIB // 2), _picture(2, MIB // 2)
            await store.put(*kept)
            await store.probe()
            ballast = full_disk.fill(disk)
            with pytest.raises(StorageUnavailable):
                await store.probe()
            with pytest.raises(StorageUnavailable) as raised:
                await store.put(*more)
            assert raised.value.metadata["cause"] == "ENOSPC"
            assert raised.value.retry_after_s is not None
            assert str(disk) not in raised.value.message
            assert _everything(disk) == {kept[0], "ballast"}
            assert await store.get(kept[0]) == kept[1]
            assert await store.get(more[0]) is None
            assert store.size_bytes == MIB // 2
            ballast.unlink()
            await store.put(*more)
            assert await store.get(more[0]) == more[1]


async def test_a_disk_that_forbids_writing_is_said_and_still_read(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=4 * MIB) as disk:
        clock, folder = FakeTime(), disk / "results"
        async with _store(folder, clock=clock) as store:
            await store.put(*_picture(1))
        half = folder / "incoming" / ("f" * 64)
        half.write_bytes(b"half")
        with full_disk.read_only(disk):
            async with _store(folder, clock=clock) as store:
                for number in (1, 2):
                    with pytest.raises(StorageUnavailable, match="cannot be written"):
                        await store.put(*_picture(number))
                assert await store.get(_picture(1)[0]) is not None
                clock.now += 61
                with pytest.raises(StorageUnavailable):
                    await store.sweep()
                assert len(store) == 1
                assert half.exists()
        async with _store(folder, clock=clock) as store:
            await store.put(*_picture(2))
            await _swept(store)
            assert _everything(disk) == {_picture(2)[0]}


async def test_a_leftover_that_cannot_be_removed_for_another_reason_is_said(tmp_path: Path) -> None:
    async with _store(tmp_path):
        pass
    (tmp_path / "incoming" / "folder").mkdir()
    with pytest.raises(StorageUnavailable, match="the disk has failed"):
        await ContentStore(tmp_path, budget_bytes=MIB, ttl_s=60).open()


async def test_a_limit_on_files_or_a_folder_in_the_way_is_said_and_heals(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:
        digest, data = _picture(1, 100_000)
        with full_disk.files_at_most(50_000), pytest.raises(StorageUnavailable) as raised:
            await store.put(digest, data)
        assert raised.value.metadata["cause"] == "EFBIG"
        assert _everything(tmp_path) == set()
        _file(tmp_path, digest).parent.rmdir()
        _file(tmp_path, digest).parent.touch()
        with pytest.raises(StorageUnavailable):
            await store.put(digest, data)
        _file(tmp_path, digest).parent.unlink()
        await store.put(digest, data)
        assert await store.get(digest) == data


async def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    async with _store(tmp_path) as first:
        (tmp_path / "incoming" / ("f" * 64)).write_bytes(b"being written by the first")
        second = ContentStore(tmp_path, budget_bytes=MIB, ttl_s=60)
        with pytest.raises(StorageUnavailable, match="another process"):
            await second.open()
        with pytest.raises(StorageUnavailable, match="not open"):
            await second.get("0" * 64)
        assert (tmp_path / "incoming" / ("f" * 64)).exists()
        await first.close()
        await second.open()
        await second.close()
        with pytest.raises(StorageUnavailable, match="closed"):
            await second.get("0" * 64)


async def test_many_at_once_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    pictures = [_named(os.urandom(2000)) for _ in range(20)]
    async with _store(tmp_path, budget_bytes=25_000) as store:

        async def churn(digest: str, data: bytes) -> None:
            for _ in range(5):
                await store.put(digest, data)
                assert await store.get(digest) in (data, None)  # another one may have pushed it out
                await store.sweep()

        await asyncio.gather(*(churn(*picture) for picture in pictures * 2))
        assert store.size_bytes == 2000 * len(store) <= 25_000
        assert len(_everything(tmp_path)) == len(store)


@pytest.mark.parametrize("wrong_s", [-7200.0, 7200.0])
async def test_a_picture_that_was_put_under_a_wrong_clock_outlives_a_restart(tmp_path: Path, wrong_s: float) -> None:
    clock = FakeTime()
    async with _store(tmp_path, clock=clock) as store:
        clock.wrong_s = wrong_s
        await store.put(*_picture(1))
    clock.wrong_s = 0.0
    for _ in range(2):
        async with _store(tmp_path, clock=clock) as store:
            assert store.holds(_picture(1)[0])
            assert await store.get(_picture(1)[0]) is not None
    async with _store(tmp_path, clock=clock) as store:
        clock.now += 61
        assert await store.get(_picture(1)[0]) is None


async def test_an_image_whose_time_is_renewed_stays_as_long_as_a_new_one_also_after_a_restart(tmp_path: Path) -> None:
    clock = FakeTime()
    (kept, data), (left, other) = _picture(1), _picture(2)
    async with _store(tmp_path, clock=clock) as store:
        await store.put(kept, data)
        await store.put(left, other)
        clock.now += 40
        assert await store.renew(kept)
        clock.now += 40
        await _swept(store)
        assert (await store.get(kept), await store.get(left)) == (data, None)
        assert not await store.renew(left)
        assert not await store.renew("0" * 64)
    async with _store(tmp_path, clock=clock) as store:
        clock.now += 15
        assert await store.renew(kept)
        clock.now += 59
        assert store.holds(kept)
        clock.now += 2
        assert not store.holds(kept)
        assert not await store.renew(kept), "too late, though its file is still there"


async def test_an_image_that_is_not_what_it_was_is_not_renewed(tmp_path: Path) -> None:
    digest, data = _picture(1)
    async with _store(tmp_path) as store:
        await store.put(digest, data)
        _file(tmp_path, digest).write_bytes(data[:-1] + b"x")
        assert not await store.renew(digest)
        assert not store.holds(digest)
        await store.put(digest, data)
        _file(tmp_path, digest).unlink()
        assert not await store.renew(digest)
        await store.put(digest, data)
        assert await store.renew(digest)
        assert await store.get(digest) == data


async def test_the_owner_with_most_loses_its_oldest_whoever_needs_room(tmp_path: Path) -> None:
    async with _store(tmp_path, budget_bytes=10_000) as store:
        modest = [_picture(number) for number in range(3)]
        for digest, data in modest:
            await store.put(digest, data, owner="modest")
        greedy = [_picture(number, 2000) for number in range(100, 140)]
        for digest, data in greedy:
            await store.put(digest, data, owner="greedy")
        assert [await store.get(digest) for digest, _ in modest] == [data for _, data in modest]
        assert [store.holds(digest) for digest, _ in greedy] == [False] * 37 + [True] * 3
        assert store.size_bytes == 9000
        for number in range(4):
            await store.put(*_picture(10 + number), owner="late")
        assert [store.holds(digest) for digest, _ in greedy[-3:]] == [False, False, True]
        assert all(store.holds(digest) for digest, _ in modest)


async def test_an_image_of_two_owners_stays_while_one_of_them_keeps_it(tmp_path: Path) -> None:
    async with _store(tmp_path, budget_bytes=10_000) as store:
        shared, data = _picture(0)
        for owner in ("modest", "greedy"):
            await store.put(shared, data, owner=owner)
        for number in range(100, 130):
            await store.put(*_picture(number, 2000), owner="greedy")
        assert store.holds(shared)


async def test_a_released_image_goes_at_once_but_not_from_another_owner_nor_if_it_was_put_again(tmp_path: Path) -> None:
    clock = FakeTime()
    async with _store(tmp_path, clock=clock) as store:
        for digest, data in map(_picture, (1, 2, 3)):
            await store.put(digest, data, owner="one")
        await store.put(*_picture(2), owner="other")
        began = store.steady()
        clock.now += 1
        await store.put(*_picture(3), owner="one")
        for digest, _ in map(_picture, (1, 2, 3, 4)):
            await store.release(digest, owner="one", put_before=began)
            await store.release(digest, owner="nobody", put_before=began)
        assert [await store.get(digest) is not None for digest, _ in map(_picture, (1, 2, 3))] == [False, True, True]
        assert _everything(tmp_path).isdisjoint({_picture(1)[0]})
        clock.now += 1
        await store.release(_picture(2)[0], owner="other", put_before=store.steady())
        assert await store.get(_picture(2)[0]) is None
        assert store.size_bytes == 1000


async def test_whose_an_image_is_counts_after_a_restart(tmp_path: Path) -> None:
    modest, greedy = _picture(0), [_picture(number, 2000) for number in range(100, 104)]
    time = FakeTime()
    async with _store(tmp_path, budget_bytes=10_000, clock=time) as store:
        for digest, data in (modest, *greedy):
            time.now += 1
            await store.put(digest, data, owner="whoever")
    async with _store(tmp_path, budget_bytes=10_000, clock=time) as store:
        await store.assign({modest[0]: ["modest"], **{digest: ["greedy"] for digest, _ in greedy}})
        assert (len(store), store.size_bytes) == (5, 9000)
        await store.put(*_picture(120, 2000), owner="greedy")
        assert store.holds(modest[0])
        assert not store.holds(greedy[0][0])


async def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr("bottega.storage.content.check", lambda descriptor, digest: hashed.append(digest))
    async with _store(tmp_path) as store:
        digest, data = _picture(1)
        await store.put(digest, data)
        await asyncio.sleep(0.2)
        for _ in range(50):
            assert await store.get(digest) == data
        assert len(hashed) == 1
        os.utime(_file(tmp_path, digest))
        await store.get(digest)
        assert len(hashed) == 2


async def test_an_owner_with_a_thousand_reads_holds_up_no_other(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:
        digest, data = _picture(1, MIB)
        await store.put(digest, data)
        ended: list[str] = []

        async def read(owner: str) -> None:
            reader = await store.reader(digest, owner=owner)
            assert reader is not None
            async with reader:
                assert len(await reader.read(0, MIB)) == MIB
            ended.append(owner)

        greedy = [asyncio.create_task(read("greedy")) for _ in range(300)]
        await asyncio.sleep(0)
        await asyncio.gather(*(read("modest") for _ in range(3)))
        assert ended.count("greedy") < 20
        for task in greedy[:100]:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        await read("modest")
