"""The command and the SDK with what LoRA stores have in quarantine, against a real gateway with one store or two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import Result

from bottega import errors
from bottega.client import AsyncClient
from bottega.v1 import lora_pb2 as pb
from tests.support.gateway_with_loras import lora_store
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_loras import lora_file, running
from tests.support.terminal import run_at


async def _run(gateway: Running, *said: object) -> Result:
    return await run_at(gateway, "loras", *said)


async def _fill(folder: Path, *names: str) -> list[pb.StoredLora]:
    """The state of a store whose catalogue is gone."""
    async with running(folder) as store:
        made = [
            await store.upload(name, lora_file(folder, seed=seed), trigger_words=[f"in {name}"])
            for seed, name in enumerate(names)
        ]
    (folder / "catalogue.db").unlink()
    return made


async def test_the_command_lists_what_is_in_quarantine_brings_it_back_and_discards_it(tmp_path: Path) -> None:
    ink, wash, dots = await _fill(tmp_path / "store", "ink", "wash", "dots")
    async with running_gateway() as gateway, lora_store(gateway, tmp_path / "store", name="loras"):
        listed = await _run(gateway)
        assert listed.stderr.splitlines() == [
            "3 more are in quarantine: bottega loras quarantine lists them.",
            "There are no LoRAs yet: bottega loras add NAME FILE.",
        ]
        shown = await _run(gateway, "quarantine")
        rows = [line.split() for line in shown.stdout.splitlines() if "miniature" in line]
        assert [(row[0], row[1], row[-2], row[-1]) for row in sorted(rows)] == [
            (lora.name, "miniature", lora.digest[:12], "loras") for lora in (dots, ink, wash)
        ]
        assert str(tmp_path / "store" / "quarantine") in shown.stderr
        assert "bottega loras rebuild restores" in shown.stderr
        one = await _run(gateway, "rebuild", wash.digest[:12])
        assert (one.exit_code, one.stdout) == (0, "wash is restored for miniature\n")
        asked = await _run(gateway, "discard", "dots")
        assert (asked.exit_code, "Delete 1 for good (dots)?" in asked.stderr) == (1, True)
        gone = await _run(gateway, "discard", "dots", "--yes")
        assert re.fullmatch(r"1 deleted, [1-9]\.\d KiB free\n", gone.stdout)
        assert (await _run(gateway, "rebuild")).stdout == "ink is restored for miniature\n"
        assert [line.split()[0] for line in (await _run(gateway)).stdout.splitlines() if "miniature" in line] == [
            "ink",
            "wash",
        ]
        none = await _run(gateway, "rebuild")
        assert (none.exit_code, none.stderr) == (0, "The quarantine is empty: the catalogue knows every file.\n")
        assert (await _run(gateway, "quarantine")).stderr == "The quarantine is empty.\n"
        unknown = await _run(gateway, "discard", "dots")
        assert (unknown.exit_code, unknown.stderr.splitlines()[0]) == (
            1,
            "error: nothing in quarantine has the name or ID dots",
        )
        assert (await _run(gateway, "discard")).exit_code == 2


async def test_a_lora_in_quarantine_is_looked_after_in_the_store_that_has_it(tmp_path: Path) -> None:
    (ink,) = await _fill(tmp_path / "first", "ink")
    (wash,) = await _fill(tmp_path / "second", "wash")
    async with (
        running_gateway() as gateway,
        lora_store(gateway, tmp_path / "first", name="first"),
        lora_store(gateway, tmp_path / "second", name="second"),
        AsyncClient(gateway.address, fleet_address=gateway.fleet_address) as client,
    ):
        found = {(each.store, lora.name): lora for each in await client.lora_quarantines() for lora in each.loras}
        assert sorted(found) == [("first", "ink"), ("second", "wash")]
        assert await client.loras_in_quarantine() == 2
        back = await client.restore_lora(found["second", "wash"].id)
        assert (back.lora.digest, list(back.lora.trigger_words)) == (wash.digest, ["in wash"])
        assert await client.discard_lora(found["first", "ink"].id) == ink.size_bytes
        with pytest.raises(errors.LoraNotFound):
            await client.restore_lora(found["first", "ink"].id)
        assert [lora.name for lora in await client.loras()] == ["wash"]
