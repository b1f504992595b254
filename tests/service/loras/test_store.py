"""A LoRA store: what is brought is imported, listed, sent by digest over links, kept over a restart, and removed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bottega.errors import (
    BadLora,
    BottegaError,
    ConfigError,
    InvalidRequest,
    LoraExists,
    LoraInUse,
    LoraNotFound,
    TooLarge,
)
from bottega.loras.config import ImportConfig, OwnLora
from bottega.loras.store import LoraStore
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.v1 import lora_pb2 as pb
from tests.fakes.listening import FakeListening
from tests.samples.lora_files import canonical_deltas
from tests.support.running_loras import (
    MODULE,
    PATIENCE_S,
    config,
    fetch,
    lora_file,
    peft_folders,
    refused,
    running,
    upload_requests,
)


async def test_an_uploaded_lora_is_listed_and_sent_by_its_digest(tmp_path: Path) -> None:
    async with running(tmp_path / "store", import_processes=True) as store:
        lora = await store.upload("style/ink", lora_file(tmp_path, text=True), trigger_words=["in ink"])
        assert (lora.name, lora.base, lora.rank, lora.modules) == ("style/ink", "miniature", 2, 2)
        assert (lora.format, list(lora.trigger_words)) == ("kohya", ["in ink"])
        assert lora.text_bytes > 0
        got = await store.call("GetLora", name="style/ink")
        assert got.lora.digest == lora.digest
        with await store.link() as link:
            data = await asyncio.to_thread(fetch, link, lora.digest)
    assert hashlib.sha256(data).hexdigest() == lora.digest
    assert len(data) == lora.size_bytes
    path = tmp_path / "fetched.safetensors"
    path.write_bytes(data)
    assert set(canonical_deltas(path)) == {f"unet.{MODULE}", "text_encoder.encoder.layers.0.self_attn.q_proj"}


async def test_the_same_lora_again_with_other_trigger_words_gets_those_and_keeps_the_rest(tmp_path: Path) -> None:
    path = lora_file(tmp_path)
    root = ImportConfig(root=str(tmp_path))
    async with running(tmp_path / "store", config(imports=root)) as store:
        await store.upload("a", path, trigger_words=["in ink"])
        await store.call("PinLora", name="a", pinned=True)
        first = await store.store.catalogue.get("a")
        again = await store.upload("a", path, trigger_words=["inked", "drawn"])
        assert await store.store.catalogue.get("a") == replace(first, trigger_words=("inked", "drawn"))
        assert await store.upload("a", path) == again, "it says none, and so takes none away"
        third = {"name": "a", "base": "miniature", "path": path.name, "trigger_words": ["third"]}
        assert list((await store.call("RegisterLora", **third)).lora.trigger_words) == ["third"]
        other = upload_requests("a", lora_file(tmp_path, seed=1).read_bytes(), trigger_words=["fourth"])
        assert isinstance(await refused(store.stub.UploadLora(other, timeout=PATIENCE_S)), LoraExists)


async def test_an_upload_whose_bytes_are_not_those_announced_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    data = lora_file(tmp_path).read_bytes()
    async with running(tmp_path / "store") as store:
        for requests, kind in (
            (upload_requests("a", data, sha256="0" * 64), BadLora),
            (upload_requests("a", data, size_bytes=len(data) + 1), InvalidRequest),
            (upload_requests("a", data, size_bytes=len(data) - 1), InvalidRequest),
            (upload_requests("a", data[:-40]), BadLora),
        ):
            error = await refused(store.stub.UploadLora(requests, timeout=PATIENCE_S))
            assert type(error) is kind, error.message
    assert not [path for path in (tmp_path / "store" / "files").rglob("*") if path.is_file()]


def _parts(folder: Path, *components: str) -> tuple[list[pb.UploadLoraPart], bytes]:
    """Of an upload of these components' files, and their bytes."""
    files = {component: folder / component / "adapter_model.safetensors" for component in components}
    parts = [
        pb.UploadLoraPart(
            component=component,
            size_bytes=path.stat().st_size,
            adapter_config=path.with_name("adapter_config.json").read_bytes(),
        )
        for component, path in files.items()
    ]
    return parts, b"".join(path.read_bytes() for path in files.values())


async def test_parts_of_an_upload_that_are_not_those_announced_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    parts, data = _parts(peft_folders(tmp_path / "peft"), "unet", "text_encoder")
    unet, text = parts
    bare = pb.UploadLoraPart(component="unet", size_bytes=unet.size_bytes)
    swapped = [
        pb.UploadLoraPart(component=a.component, size_bytes=b.size_bytes, adapter_config=b.adapter_config)
        for a, b in ((unet, text), (text, unet))
    ]
    wrong: list[tuple[dict[str, Any], type[BottegaError], str]] = [
        ({"parts": parts, "sha256": "0" * 64}, BadLora, "SHA-256"),
        ({"parts": [bare, text]}, BadLora, "alpha is in adapter_config.json"),
        ({"parts": swapped}, BadLora, ""),
    ]
    async with running(tmp_path / "store") as store:
        for changed, kind, says in wrong:
            requests = upload_requests("a", data, **changed)
            error = await refused(store.stub.UploadLora(requests, timeout=PATIENCE_S))
            assert isinstance(error, kind), error.message
            assert says in str([error.message, *getattr(error, "violations", ())])
    assert not [path for path in (tmp_path / "store" / "files").rglob("*") if path.is_file()]


async def test_a_folder_below_the_root_is_registered_and_nothing_beside_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    lora_file(root)
    lora_file(outside)
    (root / "link").symlink_to(outside)
    (root / "circle").symlink_to(root / "circle")
    (root / "linked").mkdir()
    (root / "linked" / "a.safetensors").symlink_to(next(outside.iterdir()))
    async with running(tmp_path / "store", config(imports=ImportConfig(root=str(root)))) as store:

        def register(path: str) -> object:
            return store.call("RegisterLora", name="a", base="miniature", path=path)

        for path in ("../outside", "link", "linked", "circle", "x" * 4096, str(outside), "absent", "", "a\0b"):
            assert isinstance(await refused(register(path)), InvalidRequest), path
        response = await register(".")  # type: ignore[misc]
        assert response.lora.modules == 1


async def test_a_store_has_its_own_loras_from_every_start_and_keeps_what_has_their_names(tmp_path: Path) -> None:
    own = {
        "checked": OwnLora(path="miniature/checked"),
        "taken": OwnLora(path=str(lora_file(tmp_path, seed=1))),
        "broken": OwnLora(path=str(tmp_path / "absent")),
    }
    async with running(tmp_path / "store") as store:
        kept = await store.upload("taken", lora_file(tmp_path))
    async with running(tmp_path / "store", config(loras=own)) as store:
        listed = (await store.call("ListLoras")).loras
        assert [(lora.name, lora.format) for lora in listed] == [("checked", "PEFT"), ("taken", "kohya")]
        assert listed[1].digest == kept.digest
        await store.call("DeleteLora", name="checked")
    async with running(tmp_path / "store", config(loras=own)) as store:
        again = await store.call("GetLora", name="checked")
        assert again.lora.digest == listed[0].digest


async def test_a_lora_of_its_own_whose_file_is_gone_is_brought_again(tmp_path: Path) -> None:
    own = {"ink": OwnLora(path=str(lora_file(tmp_path)))}
    async with running(tmp_path / "store", config(loras=own)) as store:
        lora = (await store.call("GetLora", name="ink")).lora
    (file,) = (tmp_path / "store").rglob(f"{lora.digest}.safetensors")
    file.unlink()
    async with running(tmp_path / "store", config(loras=own)) as store:
        with await store.link() as link:
            data = await asyncio.to_thread(fetch, link, lora.digest)
    assert hashlib.sha256(data).hexdigest() == lora.digest


def test_own_loras_that_cannot_be_anybodys_keep_a_store_from_starting(tmp_path: Path) -> None:
    for own in ({"a b": OwnLora(path="x")}, {"ink": OwnLora(path="x", base="other")}):
        with pytest.raises(ConfigError, match=next(iter(own))):
            LoraStore(config(loras=own), folder=tmp_path, listening=FakeListening())


async def test_a_lora_that_was_asked_for_a_moment_ago_is_not_removed(tmp_path: Path) -> None:
    async with running(tmp_path / "store", config(lease_s=60.0)) as store:
        lora = await store.upload("a", lora_file(tmp_path))
        assert not (await store.call("PrefetchLoras", digests=[lora.digest], only_keep=True)).accepted
        assert (await store.call("GetLora", name="a")).lora.state == pb.LORA_STATE_ON_DISK
        assert isinstance(await refused(store.call("DeleteLora", name="a")), LoraInUse)
        accepted = await store.call("PrefetchLoras", digests=[lora.digest, "0" * 64])
        assert list(accepted.accepted) == [lora.digest]
        assert isinstance(await refused(store.call("DeleteLora", name="a")), LoraInUse)
        needed = store.store._needed_until
        store.store._needed_until = {digest: until_s - 60.0 for digest, until_s in needed.items()}  # a minute later
        await store.call("DeleteLora", name="a")
        assert isinstance(await refused(store.call("GetLora", name="a")), LoraNotFound)
    assert not list((tmp_path / "store" / "files").glob("??/*.safetensors"))


async def test_a_lora_that_is_being_sent_is_not_removed(tmp_path: Path) -> None:
    links = LimitedLinksConfig(socket=None, bytes_per_s=10_000)
    async with running(tmp_path / "store", config(links=links)) as store:
        lora = await store.upload("a", lora_file(tmp_path, rank=8))
        with await store.link() as link:
            fetching = asyncio.create_task(asyncio.to_thread(fetch, link, lora.digest))
            while not store.store._cache.leases(lora.digest):  # noqa: ASYNC110 - the moment at which it begins
                await asyncio.sleep(0.005)
            error = await refused(store.call("DeleteLora", name="a"))
            assert isinstance(error, LoraInUse)
            assert len(await fetching) == lora.size_bytes


async def test_files_of_a_name_that_others_share_stay(tmp_path: Path) -> None:
    path = lora_file(tmp_path)
    async with running(tmp_path / "store") as store:
        lora = await store.upload("a", path)
        await store.upload("b", path)
        await store.call("DeleteLora", name="a")
        with await store.link() as link:
            assert len(await asyncio.to_thread(fetch, link, lora.digest)) == lora.size_bytes


async def test_what_does_not_fit_beside_others_that_are_pinned_is_not_pinned(tmp_path: Path) -> None:
    async with running(tmp_path / "store", config(budget_bytes=3000)) as store:
        for seed, name in enumerate("ab"):
            await store.upload(name, lora_file(tmp_path, seed=seed))
        await store.upload("same", lora_file(tmp_path))
        for name in ("a", "a", "same"):  # one file: it is there once
            await store.call("PinLora", name=name, pinned=True)
        error = await refused(store.call("PinLora", name="b", pinned=True))
        assert (type(error), error.metadata) == (TooLarge, {"limit": "budget_bytes"})
        assert not (await store.store.catalogue.get("b")).pinned
        for name in ("a", "same"):
            await store.call("PinLora", name=name, pinned=False)
        await store.call("PinLora", name="b", pinned=True)


async def test_an_upload_that_trickles_is_ended_in_the_time_that_it_has_and_leaves_nothing(tmp_path: Path) -> None:
    data = lora_file(tmp_path).read_bytes()

    async def trickling() -> AsyncIterator[pb.UploadLoraRequest]:
        for request in upload_requests("a", data, chunk_bytes=10):
            yield request
            # gRPC's client loses why a stream was ended where a message is just being sent: it says INTERNAL.
            await asyncio.sleep(0.2)

    async with running(tmp_path / "store", config(imports=ImportConfig(upload_s=0.3))) as store:
        error = await refused(store.stub.UploadLora(trickling(), timeout=PATIENCE_S))
        assert isinstance(error, InvalidRequest)
        assert "imports.upload_s" in error.message
        assert not [path for path in (tmp_path / "store" / "files").rglob("*") if path.is_file()]


async def test_a_digest_that_is_not_there_is_refused_and_the_link_lives(tmp_path: Path) -> None:
    async with running(tmp_path / "store") as store:
        lora = await store.upload("a", lora_file(tmp_path))
        with await store.link() as link:
            with pytest.raises(LoraNotFound):
                await asyncio.to_thread(fetch, link, "0" * 64)
            assert len(await asyncio.to_thread(fetch, link, lora.digest, 2)) == lora.size_bytes
            assert len(await asyncio.to_thread(fetch, link, lora.digest, 3)) == lora.size_bytes
        # The first of them brought it into memory, in which the second has found it.
        activity = store.store.load().activity
        assert (activity.lookups, activity.hits) == (2, 1)


def _import_processes() -> Iterator[psutil.Process]:
    """Servers of other tests have processes that come and go."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "bottega.loras.importing.process" in child.cmdline():
                yield child


async def test_an_import_that_needs_too_much_memory_is_ended_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.loras.importing.import_processes._ADDRESS_SPACE_BYTES", 40 << 20)
    async with running(tmp_path / "store", import_processes=True) as store:
        requests = upload_requests("a", lora_file(tmp_path).read_bytes())
        error = await refused(store.stub.UploadLora(requests, timeout=60))
        assert error.reason_name in {"BAD_LORA", "INTERNAL"}
        monkeypatch.undo()
        assert (await store.upload("a", lora_file(tmp_path))).modules == 1
    assert not list(_import_processes())
