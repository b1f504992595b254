"""A LoRA store whose disk is full, cannot be written or has changed a bit: it says so, and heals by itself."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path

import pytest

from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.errors import DataLoss, StorageUnavailable
from bottega.loras.importing.import_processes import ImportJob, ImportProcesses, ImportSource
from bottega.miniature import WEIGHTS
from tests.support.full_disk import fill, small_disk
from tests.support.running_loras import PATIENCE_S, fetch, lora_file, refused, running, upload_requests

# More than may be under way at once: what every failed one kept would be missed.
_MANY = 20


@pytest.mark.parametrize("rank", [2, 64], ids=["less than a buffer", "more"])
async def test_a_full_disk_is_said_and_nothing_of_what_was_brought_stays(tmp_path: Path, rank: int) -> None:
    data = lora_file(tmp_path, rank=rank).read_bytes()
    assert (len(data) < io.DEFAULT_BUFFER_SIZE) == (rank == 2)
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        async with running(disk / "store") as store:
            ballast = await asyncio.to_thread(fill, disk)
            error = await refused(store.stub.UploadLora(upload_requests("a", data), timeout=PATIENCE_S))
            assert isinstance(error, StorageUnavailable)
            assert error.message.startswith("the disk is full: ")
            assert error.metadata["cause"] == "ENOSPC"
            ballast.unlink()
            lora = await store.upload("a", lora_file(tmp_path, rank=rank))
            with await store.link() as link:
                assert len(await asyncio.to_thread(fetch, link, lora.digest)) == lora.size_bytes
        assert not list((disk / "store" / "files" / "incoming").iterdir())


async def test_on_a_full_disk_room_is_made_by_removing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        async with running(disk / "store") as store:
            for seed in range(2):
                await store.upload(f"a{seed}", lora_file(tmp_path, seed=seed, rank=64))
            ballast = await asyncio.to_thread(fill, disk)
            await store.call("DeleteLora", name="a0")
            left = await store.call("ListLoras")
            assert [lora.name for lora in left.loras] == ["a1"]
            ballast.unlink()


async def test_uploads_that_failed_for_the_disk_leave_room_for_those_that_come_later(tmp_path: Path) -> None:
    data = lora_file(tmp_path).read_bytes()
    incoming = tmp_path / "store" / "files" / "incoming"
    async with running(tmp_path / "store") as store:
        incoming.rmdir()
        for _ in range(_MANY):
            error = await refused(store.stub.UploadLora(upload_requests("a", data), timeout=PATIENCE_S))
            assert isinstance(error, StorageUnavailable), error.message
        incoming.mkdir()
        assert (await store.upload("a", lora_file(tmp_path))).modules == 1


async def test_a_caller_that_goes_at_the_last_moment_leaves_no_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gate = threading.Event(), threading.Event()
    async with running(tmp_path / "store") as store:
        adopt = store.store._files.adopt

        def slow(spool: Path) -> tuple[str, CanonicalLora]:
            adopted = adopt(spool)
            kept.set()
            gate.wait(PATIENCE_S)
            return adopted

        monkeypatch.setattr(store.store._files, "adopt", slow)
        call = store.stub.UploadLora(upload_requests("a", lora_file(tmp_path).read_bytes()))
        assert await asyncio.to_thread(kept.wait, PATIENCE_S)
        call.cancel()
        await asyncio.sleep(0.1)  # the store hears of it
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            while not await store.store.catalogue.page(size=1, after="", base=""):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
    assert len(list((tmp_path / "store" / "files").glob("??/*.safetensors"))) == 1


async def test_an_import_that_finds_the_disk_full_does_not_blame_the_file(tmp_path: Path) -> None:
    source = lora_file(tmp_path)
    full = ImportJob(
        sources=(ImportSource(path=source),),
        size_bytes=source.stat().st_size,
        base=WEIGHTS,
        output=Path("/dev/full"),
    )
    with pytest.raises(StorageUnavailable, match="full") as caught:
        await ImportProcesses(at_once=1, deadline_s=PATIENCE_S, cpu_s=20).run(full)
    assert caught.value.metadata["cause"] == "ENOSPC"


async def test_a_damaged_file_is_replaced_by_bringing_it_again(tmp_path: Path) -> None:
    async with running(tmp_path / "store") as store:
        lora = await store.upload("a", lora_file(tmp_path))
        (path,) = (tmp_path / "store" / "files").glob("??/*.safetensors")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with await store.link() as link:
            with pytest.raises(DataLoss, match="added again"):
                await asyncio.to_thread(fetch, link, lora.digest)
            assert await store.upload("a", lora_file(tmp_path)) == lora
            assert await asyncio.to_thread(fetch, link, lora.digest, 2) == whole
        assert store.store._files.used_bytes == len(whole)
