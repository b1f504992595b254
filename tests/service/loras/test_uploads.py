"""Unfinished uploads of a LoRA store: they count before their bytes come, end when they lie idle, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from bottega.errors import BottegaError, InvalidRequest, QueueFull, StorageUnavailable
from bottega.loras.upload import Upload, receive
from bottega.rpc.status import from_rpc_error
from bottega.v1 import lora_pb2 as pb
from bottega.v1 import lora_pb2_grpc
from tests.samples.lora_files import save
from tests.support.full_disk import small_disk
from tests.support.running_loras import PATIENCE_S, Running, config, lora_file, running, upload_requests
from tests.support.waiting import eventually, wait_until

_IDLE_S = 0.5


def _announced(name: str, size_bytes: int) -> pb.UploadLoraRequest:
    head = pb.UploadLoraHead(name=name, base="miniature", sha256="a" * 64, size_bytes=size_bytes)
    return pb.UploadLoraRequest(head=head)


@contextlib.asynccontextmanager
async def _unfinished(store: Running, size_bytes: int) -> AsyncIterator[Any]:
    """An upload that has announced so many bytes, and sends none; the store knows it."""
    gone = asyncio.Event()

    async def said() -> AsyncIterator[pb.UploadLoraRequest]:
        yield _announced("slow", size_bytes)
        await gone.wait()

    before = _incoming(store)
    call = store.stub.UploadLora(said(), timeout=PATIENCE_S)
    await eventually(lambda: _incoming(store) != before)
    try:
        yield call
    finally:
        gone.set()
        call.cancel()


def _incoming(store: Running) -> list[Path]:
    return sorted((Path(store.store.recovery.quarantine.place).parent / "files" / "incoming").iterdir())


async def _refused(store: Running, said: Iterator[pb.UploadLoraRequest]) -> BottegaError:
    """Why an upload is refused. By gRPC's blocking call, as in the SDK: that of asyncio may lose what a server says
    that refuses before it has heard everything."""

    def call() -> BottegaError:
        with grpc.insecure_channel(store.server.address) as channel:
            try:
                lora_pb2_grpc.LoraServiceStub(channel).UploadLora(said, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                return from_rpc_error(error)
        raise AssertionError("the call was answered")

    return await asyncio.to_thread(call)


def _small(folder: Path, **head: Any) -> Iterator[pb.UploadLoraRequest]:
    return upload_requests("a", lora_file(folder).read_bytes(), **head)


async def test_what_an_upload_has_announced_counts_into_the_budget_until_it_ends(tmp_path: Path) -> None:
    settings = config(disk_bytes=10 << 20)
    async with running(tmp_path / "store", settings) as store:
        async with _unfinished(store, 4 << 20):
            error = await _refused(store, _small(tmp_path, size_bytes=1 << 20))
            assert isinstance(error, QueueFull)
            assert "running uploads have reserved" in error.message
            assert error.retry_after_s
            assert (await store.upload("small", lora_file(tmp_path))).modules == 1
        await eventually(lambda: not _incoming(store))
        assert (await store.upload("a", lora_file(tmp_path, rank=64))).modules == 1


async def test_an_upload_ends_when_others_have_filled_the_disk_to_the_reserve(tmp_path: Path) -> None:
    data = bytes(2 << 20)
    with small_disk(tmp_path / "disk", size_bytes=8 << 20) as disk:
        async with running(disk / "store", config(min_free_bytes=1 << 30)) as store:

            def said() -> Iterator[pb.UploadLoraRequest]:
                head = pb.UploadLoraHead(
                    name="a", base="miniature", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)
                )
                yield pb.UploadLoraRequest(head=head)
                yield pb.UploadLoraRequest(chunk=data[: 1 << 20])
                half = 1 << 20
                wait_until(lambda: sum(p.stat().st_size for p in _incoming(store)) >= half, "its first half")
                (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - (100 << 10)))
                yield pb.UploadLoraRequest(chunk=data[1 << 20 :])

            error = await _refused(store, said())
            assert isinstance(error, StorageUnavailable)
            assert "min_free_bytes" in error.message
            await eventually(lambda: not _incoming(store))


@pytest.mark.parametrize("chunk", [None, b"", b"x"], ids=["nothing", "empty chunks", "single bytes"])
async def test_an_upload_that_lies_idle_is_ended(tmp_path: Path, chunk: bytes | None) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(200):
            await asyncio.sleep(_IDLE_S / 10)
            if chunk is not None:
                yield chunk

    upload = Upload(sha256="a" * 64, size_bytes=1 << 20, adapter_config=b"")
    with pytest.raises(InvalidRequest, match=f"bytes in {_IDLE_S} s"):
        await receive([tmp_path / "upload"], upload, slowly(), deadline_s=60.0, idle_s=_IDLE_S)


async def test_an_upload_that_comes_slowly_and_does_not_lie_idle_is_taken(tmp_path: Path) -> None:
    """It takes longer in all than it may lie idle."""
    chunk, idle_s = bytes(300 << 10), 2.0
    data = chunk * 7

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(7):
            yield chunk
            await asyncio.sleep(idle_s / 5)

    began = time.monotonic()
    upload = Upload(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), adapter_config=b"")
    await receive([tmp_path / "upload"], upload, slowly(), deadline_s=60.0, idle_s=idle_s)
    assert time.monotonic() - began > idle_s
    assert (tmp_path / "upload").read_bytes() == data


async def test_what_a_store_that_was_killed_had_of_uploads_goes_at_its_next_start(tmp_path: Path) -> None:
    incoming = tmp_path / "store" / "files" / "incoming"
    incoming.mkdir(parents=True)
    (incoming / "unfinished").write_bytes(bytes(1 << 19))
    async with running(tmp_path / "store"):
        assert list(incoming.iterdir()) == []


_Q = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"


def _loha(**changes: Tensor) -> dict[str, Tensor]:
    """Return a LoHa of one module, with other tensors in place of some of its own."""
    parts = {f"hada_w{n}_{side}": torch.ones((96, 2) if side == "a" else (2, 96)) for n in (1, 2) for side in "ab"}
    return {f"{_Q}.{part}": tensor for part, tensor in (parts | changes).items()}


async def test_what_is_refused_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    hostile = {
        "not finite": _loha(hada_w1_a=torch.full((96, 2), torch.nan)),
        "do not fit it": _loha(hada_w1_a=torch.ones(200_000, 2), hada_w1_b=torch.ones(2, 200_000)),
    }
    async with running(tmp_path) as store:
        folder = Path(store.store.recovery.quarantine.place).parent / "files"
        before = sorted(path for path in folder.rglob("*") if path.is_file())
        for says, tensors in hostile.items():
            data = save(tensors, tmp_path / "hostile.safetensors").read_bytes()
            error = await _refused(store, upload_requests("a", data))
            assert says in error.message
            await eventually(lambda: not _incoming(store))
            assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
        assert (await store.upload("a", save(_loha(), tmp_path / "sound.safetensors"))).family == "SDXL"
