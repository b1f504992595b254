"""A LoRA store with its files in S3: what is imported outlives the store's disk, which has copies of what is used."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path

import pytest

from bottega.errors import DataLoss, LoraInUse, LoraNotFound, StorageUnavailable, TooLarge
from bottega.loras.config import LoraConfig
from bottega.v1 import lora_pb2 as pb
from tests.support import s3
from tests.support.running_loras import (
    PATIENCE_S,
    Running,
    config,
    lora_file,
    refused,
    running,
    served,
    upload_requests,
)


def _settings(bucket: str, **changed: object) -> LoraConfig:
    return config(objects=f"s3://{bucket}/loras", **changed)


async def _listed(store: Running) -> dict[str, pb.StoredLora]:
    return {lora.name: lora for lora in (await store.call("ListLoras")).loras}


def _lose_files(folder: Path) -> None:
    for part in ("tier", "files", "quarantine"):
        shutil.rmtree(folder / part, ignore_errors=True)


async def test_loras_in_s3_are_served_after_the_store_has_lost_its_disk(tmp_path: Path, bucket: str) -> None:
    folder = tmp_path / "store"
    async with running(folder, _settings(bucket)) as store:
        ink = await store.upload("ink", lora_file(tmp_path), trigger_words=["in ink"])
        wash = await store.upload("wash", lora_file(tmp_path, seed=1))
        assert await served(store, ink.digest)
    _lose_files(folder)
    async with running(folder, _settings(bucket)) as store:
        assert len(await _listed(store)) == 2
        assert await served(store, ink.digest)
    shutil.rmtree(folder)  # with the catalogue
    async with running(folder, _settings(bucket)) as store:
        assert await _listed(store) == {}
        found = (await store.call("ListQuarantine")).loras
        assert {lora.name: lora.size_bytes for lora in found} == {"ink": ink.size_bytes, "wash": wash.size_bytes}
        for lora in found:
            await store.call("RestoreLora", id=lora.id)
        listed = await _listed(store)
        assert list(listed["ink"].trigger_words) == ["in ink"]
        assert listed["wash"].added_s == wash.added_s
        assert not (await store.call("ListQuarantine")).loras
        assert await served(store, wash.digest)


async def test_copies_on_disk_keep_their_budget_and_all_loras_are_served(tmp_path: Path, bucket: str) -> None:
    files = [lora_file(tmp_path, seed=seed, rank=16) for seed in range(4)]
    most = 3 * files[0].stat().st_size + 10_000
    async with running(tmp_path / "store", _settings(bucket, disk_bytes=most, budget_bytes=1)) as store:
        loras = [await store.upload(f"lora-{number}", path) for number, path in enumerate(files)]
        for lora in [*loras, *reversed(loras)]:
            assert await served(store, lora.digest)
            copies = [path.stat().st_size for path in (tmp_path / "store/tier").glob("??/*")]
            assert 0 < sum(copies) <= most
        assert len(copies) < len(loras)


async def test_objects_are_within_a_budget_of_their_own(tmp_path: Path, server: s3.S3Server, bucket: str) -> None:
    first, second = (lora_file(tmp_path, seed=seed) for seed in range(2))
    settings = _settings(bucket, objects_bytes=first.stat().st_size * 3 // 2)
    async with running(tmp_path / "store", settings) as store:
        lora = await store.upload("a", first)
        error = await refused(store.stub.UploadLora(upload_requests("b", second.read_bytes()), timeout=PATIENCE_S))
        assert isinstance(error, TooLarge)
        assert "objects_bytes" in error.message
        assert await store.upload("a", first) == lora, "the same again needs no more"
    assert {key.split("/")[-1][:64] for key in server.keys(bucket)} == {lora.digest}


async def test_a_damaged_copy_is_read_from_s3_again(tmp_path: Path, bucket: str) -> None:
    folder = tmp_path / "store"
    async with running(folder, _settings(bucket)) as store:
        lora = await store.upload("a", lora_file(tmp_path))
    (copy,) = (folder / "tier").glob("??/*")
    copy.write_bytes(bytes(copy.stat().st_size))
    async with running(folder, _settings(bucket)) as store:
        assert await served(store, lora.digest)
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == lora.digest


async def test_a_damaged_object_is_data_loss_until_it_is_uploaded_again(
    tmp_path: Path, server: s3.S3Server, bucket: str
) -> None:
    async with running(tmp_path / "store", _settings(bucket)) as store:
        lora = await store.upload("a", lora_file(tmp_path))
        assert lora.state == pb.LORA_STATE_ON_DISK
        store.store._files._drop(lora.digest)  # type: ignore[union-attr]
        (key,) = [key for key in server.keys(bucket) if key.endswith(".safetensors")]
        server.put(bucket, key, bytes(lora.size_bytes))
        with pytest.raises(DataLoss, match="upload the LoRA again"):
            await served(store, lora.digest)
        await store.upload("a", lora_file(tmp_path))
        assert await served(store, lora.digest)


async def test_without_s3_nothing_is_imported_and_copies_are_served(
    tmp_path: Path, server: s3.S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.failing_proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        async with running(tmp_path / "store", _settings(bucket)) as store:
            lora = await store.upload("a", lora_file(tmp_path))
            proxy.refusal = "AccessDenied"
            other = lora_file(tmp_path, seed=1)
            error = await refused(store.stub.UploadLora(upload_requests("b", other.read_bytes()), timeout=PATIENCE_S))
            assert isinstance(error, StorageUnavailable)
            assert "allow s3:ListBucket" in error.message
            assert s3.SECRET not in error.message
            assert await served(store, lora.digest)
            for _ in range(200):
                error = await refused(store.call("DeleteLora", name="a"))
                if not isinstance(error, LoraInUse):
                    break
                await asyncio.sleep(0.05)  # the link that has just served it is still open
            assert isinstance(error, StorageUnavailable)
            assert list(await _listed(store)) == ["a"]
            proxy.refusal = ""
            await store.upload("b", other)
            await store.call("DeleteLora", name="a")
            with pytest.raises(LoraNotFound):
                await served(store, lora.digest)
    assert len(server.keys(bucket)) == 2, "the weights and the description of b"


async def test_weights_stay_in_s3_as_long_as_a_lora_has_them(tmp_path: Path, server: s3.S3Server, bucket: str) -> None:
    async with running(tmp_path / "store", _settings(bucket)) as store:
        first = await store.upload("a", lora_file(tmp_path))
        second = await store.upload("b", lora_file(tmp_path))
        assert first.digest == second.digest
        await store.call("DeleteLora", name="a")
        assert await served(store, first.digest)
        assert len(server.keys(bucket)) == 2
        await store.call("DeleteLora", name="b")
    assert server.keys(bucket) == []


async def test_the_files_of_a_store_are_moved_to_s3(tmp_path: Path, server: s3.S3Server, bucket: str) -> None:
    folder = tmp_path / "store"
    async with running(folder) as store:
        listed = await store.upload("listed", lora_file(tmp_path))
        await store.upload("unlisted", lora_file(tmp_path, seed=1))
        await store.store.catalogue.remove("unlisted")
    async with running(folder) as store:
        assert len((await store.call("ListQuarantine")).loras) == 1
    async with running(folder, _settings(bucket)) as store:
        assert list(await _listed(store)) == ["listed"]
        assert await served(store, listed.digest)
        (other,) = (await store.call("ListQuarantine")).loras
        assert other.name == "unlisted"
        assert (await store.call("DiscardLora", id=other.id)).freed_bytes == other.size_bytes
        assert not (await store.call("ListQuarantine")).loras
    assert len(server.keys(bucket)) == 2
    assert not [path for part in ("files", "quarantine") for path in (folder / part).glob("**/*.*")]
