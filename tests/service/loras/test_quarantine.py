"""A LoRA store whose catalogue is gone, damaged or older than its files: no weights are lost, and an operator gets all
of them back."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bottega.errors import BadLora, DataLoss, InvalidRequest, LoraExists, LoraNotFound, TooLarge
from bottega.v1 import lora_pb2 as pb
from tests.support.running_loras import PATIENCE_S, Running, config, fetch, lora_file, refused, running, upload_requests

_BOUNDS = [pb.LoraBound(num_inference_steps=30, max_step=12)]


async def _fill(store: Running, folder: Path, *names: str) -> dict[str, pb.StoredLora]:
    """Brings LoRAs with everything that may be known of one; the first is pinned and profiled."""
    made = {}
    for seed, name in enumerate(names):
        made[name] = await store.upload(name, lora_file(folder, seed=seed), trigger_words=[f"in {name}"])
    digest = made[names[0]].digest
    await store.call("SetLoraProfile", name=names[0], digest=digest, bounds=_BOUNDS)
    await store.call("PinLora", name=names[0], pinned=True)
    return await _listed(store)


async def _lost(folder: Path, *names: str, described: bool = True) -> dict[str, pb.StoredLora]:
    """A store with these LoRAs whose catalogue is gone; what it had. described: its files."""
    async with running(folder) as store:
        before = await _fill(store, folder.parent, *names)
    _remove(folder, described=described)
    return before


def _remove(folder: Path, *, described: bool) -> None:
    for path in () if described else folder.glob("files/??/*.json"):
        path.unlink()
    (folder / "catalogue.db").unlink()


def _change_rows(folder: Path, change: str, *values: object) -> None:
    """As a disk may, behind the store's back."""
    with closing(sqlite3.connect(folder / "catalogue.db")) as connection, connection:
        connection.execute(f"UPDATE loras SET {change}", values)


async def _listed(store: Running) -> dict[str, pb.StoredLora]:
    """By name, as far as it is the same whether it is in memory or not."""
    answer = await store.call("ListLoras")
    for lora in answer.loras:
        lora.ClearField("state")
    return {lora.name: lora for lora in answer.loras}


async def _quarantine(store: Running) -> dict[str, pb.QuarantinedLora]:
    """By name, or by id where that is not known."""
    answer = await store.call("ListQuarantine")
    return {lora.name or lora.id: lora for lora in answer.loras}


async def _restore(store: Running, id: str, **said: str) -> pb.RestoreLoraResponse:
    answer: pb.RestoreLoraResponse = await store.call("RestoreLora", id=id, **said)
    return answer


async def _restore_all(store: Running) -> None:
    for lora in (await _quarantine(store)).values():
        assert not (await _restore(store, lora.id)).unknown


async def _fetched(store: Running, digest: str) -> str:
    """The SHA-256 of what a worker gets."""
    with await store.link() as link:
        return hashlib.sha256(await asyncio.to_thread(fetch, link, digest)).hexdigest()


def _catalogue(folder: Path) -> list[Path]:
    return sorted(folder.glob("catalogue.db*"))


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("files/??/*.safetensors"))


async def test_without_its_catalogue_a_store_loses_no_lora_and_has_all_back_by_its_operators_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    async with running(folder) as store:
        before = await _fill(store, tmp_path, "ink", "wash", "style/dots")
    digests = {path.stem for path in _weights(folder)}
    for path in _catalogue(folder):
        path.rename(tmp_path / path.name)
    async with running(folder) as store:
        assert await _listed(store) == {}
        (line,) = [record for record in caplog.records if "were moved into quarantine" in record.getMessage()]
        assert "bottega loras rebuild" in line.getMessage()
        assert line.__dict__["folder"] == str(folder / "quarantine")
        assert {path.stem for path in (folder / "quarantine").glob("*.safetensors")} == digests
        found = await _quarantine(store)
        assert found.keys() == before.keys()
        assert {lora.base for lora in found.values()} == {"miniature"}
        assert found["ink"].size_bytes == before["ink"].size_bytes
        await _restore_all(store)
        assert await _listed(store) == before
        assert await _quarantine(store) == {}
        assert await _fetched(store, before["wash"].digest) == before["wash"].digest
    assert list((folder / "quarantine").iterdir()) == []
    async with running(folder) as store:
        assert await _listed(store) == before
        assert await _quarantine(store) == {}


async def test_a_catalogue_that_is_put_back_has_its_files_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with running(folder) as store:
        before = await _fill(store, tmp_path, "ink", "wash")
    for path in _catalogue(folder):
        path.rename(tmp_path / path.name)
    async with running(folder) as store:
        assert len(await _quarantine(store)) == 2
    for path in _catalogue(folder):
        path.unlink()
    for path in _catalogue(tmp_path):
        path.rename(folder / path.name)
    async with running(folder) as store:
        assert await _listed(store) == before
        assert await _fetched(store, before["ink"].digest) == before["ink"].digest


async def test_a_damaged_catalogue_is_kept_aside_and_made_anew_from_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    path = folder / "catalogue.db"
    async with running(folder) as store:
        before = await _fill(store, tmp_path, "ink", "wash")
    kept = path.read_bytes()[:4096] + b"\xff" * 64 + path.read_bytes()[4160:]
    path.write_bytes(kept)
    async with running(folder) as store:
        (aside,) = folder.glob("catalogue.damaged-*.db")
        assert aside.read_bytes() == kept
        (line,) = [record for record in caplog.records if "is damaged" in record.getMessage()]
        assert "bottega loras rebuild" in line.getMessage()
        assert line.__dict__["kept"] == str(aside)
        await _restore_all(store)
        assert await _listed(store) == before


@pytest.mark.parametrize("column", ["digest", "pinned"])
async def test_a_damaged_row_is_not_served_and_comes_back_from_its_file(
    tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    values = {"digest": "0" * 64, "pinned": 0}
    async with running(folder) as store:
        before = await _fill(store, tmp_path, "ink", "wash", "dots")
    _change_rows(folder, f"{column} = ? WHERE name = 'ink'", values[column])
    async with running(folder) as store:
        assert sorted(await _listed(store)) == ["dots", "wash"]
        page = await store.call("ListLoras", page_size=2)
        assert [lora.name for lora in page.loras] == ["dots", "wash"], "it takes no place in a page"
        error = await refused(store.call("GetLora", name="ink"))
        assert (type(error), error.metadata["loras"]) == (DataLoss, "ink")
        assert "bottega loras rebuild" in error.message
        lines = [line for line in caplog.records if "row of a LoRA is damaged" in line.getMessage()]
        assert [line.__dict__["lora"] for line in lines] == ["ink"], "once, by its name"
        await _restore_all(store)
        assert await _listed(store) == before
    async with running(folder) as store:
        assert await _listed(store) == before


async def test_weights_that_nothing_describes_come_back_for_the_base_that_they_fit_under_a_name_of_their_digest(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "store"
    before = await _lost(folder, "ink", "wash", described=False)
    lora, other = before["ink"], before["wash"]
    two = config(bases={"miniature": "miniature", "copy": "miniature"})
    async with running(folder, two) as store:
        error = await refused(store.call("RestoreLora", id=lora.digest))
        assert isinstance(error, InvalidRequest)
        assert "it fits copy, miniature: name one" in error.message
        said = await _restore(store, other.digest, name="style/wash", base="miniature")
        assert (said.lora.name, said.lora.base) == ("style/wash", "miniature")
        assert "its name" not in said.unknown
    async with running(folder) as store:
        (found,) = (await _quarantine(store)).values()
        assert (found.id, found.name, found.base) == (lora.digest, "", "")
        back = await _restore(store, found.id)
        assert back.lora.name == f"recovered-{lora.digest[:12]}"
        assert (back.lora.base, back.lora.rank, back.lora.modules) == ("miniature", lora.rank, lora.modules)
        assert set(back.unknown) == {"its name", "its format", "its trigger words", "its profile", "when it was added"}
        assert await _fetched(store, lora.digest) == lora.digest


async def test_weights_that_do_not_fit_the_base_that_is_said_are_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "store", tmp_path / "other"
    lora = (await _lost(folder, "ink", described=False))["ink"]
    (other / "unet").mkdir(parents=True)
    (other / "unet" / "config.json").write_text('{"block_out_channels": [8], "layers_per_block": 1}')
    settings = config(bases={"other": str(other)})
    async with running(folder, settings) as store:
        error = await refused(store.call("RestoreLora", id=lora.digest, base="other"))
        assert isinstance(error, BadLora), error
        error = await refused(store.call("RestoreLora", id=lora.digest))
        assert isinstance(error, InvalidRequest)
        assert len(await _quarantine(store)) == 1


async def test_damaged_weights_stay_in_quarantine_and_are_not_brought_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await _lost(folder, "ink")
    (path,) = _weights(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    async with running(folder) as store:
        (found,) = (await _quarantine(store)).values()
        error = await refused(store.call("RestoreLora", id=found.id))
        assert (type(error), error.metadata) == (DataLoss, {"loras": "ink"})
        assert await _listed(store) == {}
        assert sorted(await _quarantine(store)) == ["ink"]


async def test_of_weights_that_come_into_quarantine_twice_the_intact_ones_stay(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for damaged in (False, True, True):
        before = await _lost(folder, "ink")
        if damaged:
            (path,) = _weights(folder)
            path.write_bytes(bytes(path.stat().st_size))
    async with running(folder) as store:
        await _restore_all(store)
        assert await _fetched(store, before["ink"].digest) == before["ink"].digest


async def test_several_names_of_the_same_weights_come_back_each_and_share_them_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with running(folder) as store:
        for name in ("a", "b"):
            await store.upload(name, lora_file(tmp_path))
        before = await _listed(store)
    (folder / "catalogue.db").unlink()
    async with running(folder) as store:
        found = await _quarantine(store)
        assert sorted(found) == ["a", "b"]
        await _restore(store, found["a"].id)
        assert sorted(await _listed(store)) == ["a"]
        await store.call("DeleteLora", name="a")
        await _restore(store, found["b"].id)
        assert await _listed(store) == {"b": before["b"]}
        assert await _fetched(store, before["b"].digest) == before["b"].digest


async def test_what_was_removed_does_not_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with running(folder) as store:
        await _fill(store, tmp_path, "ink", "wash")
        await store.upload("same", lora_file(tmp_path))
        for name in ("ink", "wash"):
            await store.call("DeleteLora", name=name)
    (folder / "catalogue.db").unlink()
    async with running(folder) as store:
        assert sorted(await _quarantine(store)) == ["same"]


async def test_a_lora_that_was_brought_again_meanwhile_gets_what_it_lacks_and_another_one_of_its_name_stays(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "store"
    before = await _lost(folder, "ink", "wash")
    async with running(folder) as store:
        found = await _quarantine(store)
        again = await store.upload("ink", lora_file(tmp_path, seed=0))
        assert not again.pinned
        other = await store.upload("wash", lora_file(tmp_path, seed=9))
        back = (await _restore(store, found["ink"].id)).lora
        assert (back.pinned, list(back.bounds), list(back.trigger_words)) == (True, _BOUNDS, ["in ink"])
        assert isinstance(await refused(store.call("RestoreLora", id=found["wash"].id)), LoraExists)
        assert (await _listed(store))["wash"].digest == other.digest
        renamed = (await _restore(store, found["wash"].id, name="wash-2")).lora
        assert (renamed.name, renamed.digest) == ("wash-2", before["wash"].digest)
        assert await _quarantine(store) == {}


async def test_quarantine_counts_into_the_budget_until_its_operator_discards_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    before = await _lost(folder, "ink", "wash")
    tight = config(disk_bytes=sum(lora.size_bytes for lora in before.values()) + 1)
    async with running(folder, tight) as store:
        listed = await store.call("ListLoras")
        assert (listed.quarantined, listed.quarantined_bytes) == (2, tight.disk_bytes - 1)
        requests = upload_requests("new", lora_file(tmp_path, seed=5).read_bytes())
        error = await refused(store.stub.UploadLora(requests, timeout=PATIENCE_S))
        assert isinstance(error, TooLarge)
        assert "bottega loras quarantine" in error.message
        for lora in (await _quarantine(store)).values():
            answer = await store.call("DiscardLora", id=lora.id)
            assert answer.freed_bytes == before[lora.name].size_bytes
            gone = store.call("DiscardLora", id=lora.id)
            assert isinstance(await refused(gone), LoraNotFound)
        listed = await store.call("ListLoras")
        assert (listed.quarantined, listed.quarantined_bytes) == (0, 0)
    assert list((folder / "quarantine").iterdir()) == []


async def test_what_is_no_file_of_the_stores_is_left_alone_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    (folder / "files" / "my").mkdir(parents=True)
    (folder / "files" / "my" / "own.safetensors").write_bytes(b"mine")
    async with running(folder) as store:
        assert await _quarantine(store) == {}
    assert (folder / "files" / "my" / "own.safetensors").read_bytes() == b"mine"
    assert any(record.__dict__.get("names") == ["my"] for record in caplog.records)
