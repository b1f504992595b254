"""`bottega tenants`, and keys that the SDK and the command show."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bottega.client import AsyncClient
from bottega.errors import InvalidRequest, Unauthenticated
from bottega.rpc.security.api_keys import new_key, parse_key
from bottega.rpc.security.caller import ALL_GRANTED, Grants
from bottega.rpc.security.tenant_file import read_tenants
from tests.support.running_gateway import running_gateway
from tests.support.terminal import run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


def _made(*words: object) -> str:
    done = run("tenants", *words)
    assert done.exit_code == 0, done.output
    (key,) = [line for line in done.output.splitlines() if line.startswith("btg_")]
    return key


def test_tenants_are_added_listed_rotated_weighed_and_disabled(file: Path) -> None:
    first = _made("add", "shop", "--file", file)
    second = _made("rotate", "shop", "--keep-old", "--file", file)
    (shop,) = read_tenants(file)
    kept = [parse_key(key) for key in (second, first)]
    assert [key.key_id for key in shop.keys] == [parts.key_id for parts in kept if parts]
    listed = run("tenants", "--file", file).output
    assert "enabled" in listed
    assert first not in listed
    disabled = run("tenants", "disable", "shop", "--file", file)
    assert (disabled.exit_code, "shop --undo enables it" in disabled.stdout) == (0, True)
    assert "disabled" in run("tenants", "list", "--file", file).output
    assert run("tenants", "weight", "shop", "0.5", "--file", file).stdout == "shop weighs 0.5\n"
    run("tenants", "disable", "shop", "--undo", "--file", file)
    assert read_tenants(file)[0].weight == 0.5
    assert not read_tenants(file)[0].disabled


def test_what_a_tenant_may_use_is_changed_by_kind_and_shown(file: Path) -> None:
    _made("add", "shop", "--file", file)
    assert read_tenants(file)[0].grants == ALL_GRANTED
    done = run("tenants", "allow", "shop", "--models", "m, n,m", "--loras", "ink", "--file", file)
    assert (done.exit_code, done.stdout) == (0, "shop may use: models m n, loras ink\n")
    done = run("tenants", "allow", "shop", "--models", "", "--controlnets", "edges", "--file", file)
    assert (done.exit_code, done.stdout) == (0, "shop may use: models all, controlnets edges\n")
    assert read_tenants(file)[0].grants == Grants(loras=("ink",), controlnets=("edges",))
    assert "loras ink, controlnets edges" in run("tenants", "--file", file).output


def test_what_cannot_be_done_changes_nothing(file: Path) -> None:
    _made("add", "shop", "--file", file)
    before = file.read_bytes()
    for words, said in (
        ("add shop", "there is a tenant shop already"),
        ("rotate shops", "Tenants: shop"),
        ("disable shops", "Tenants: shop"),
        ("weight shop 0", "0.01<=x<=100"),
        ("allow shops --models m", "Tenants: shop"),
        ("allow shop", "give what it may use"),
        ("allow shop --models m,,n", "'' is no valid name"),
        ("allow shop --loras ink@press", "ink@press is for one tenant alone"),
        (f"allow shop --models {','.join(map(str, range(1025)))}", "at most 1024"),
    ):
        done = run("tenants", *words.split(), "--file", file)
        assert done.exit_code in (1, 2)
        assert said in done.output
        assert file.read_bytes() == before


async def test_a_client_shows_its_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await asyncio.to_thread(_made, "add", "shop", "--file", file)
    async with running_gateway(tenants=str(file)) as house:
        async with AsyncClient(house.address) as nobody:
            with pytest.raises(Unauthenticated, match="BOTTEGA_API_KEY"):
                await nobody.models()
        async with AsyncClient(house.address, api_key=key) as shop:
            assert not (await shop.list_jobs()).jobs
        monkeypatch.setenv("BOTTEGA_API_KEY", key)
        assert (await asyncio.to_thread(run, "jobs", "--address", house.address)).exit_code == 0
        monkeypatch.setenv("BOTTEGA_API_KEY", new_key()[0])
        refused = await asyncio.to_thread(run, "jobs", "--address", house.address)
        assert refused.exit_code == 1
        assert "bottega tenants add NAME" in refused.output


async def test_what_is_no_key_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidRequest, match="api_key: must be btg_") as refused:
        AsyncClient("127.0.0.1:1", api_key="hunter2")
    assert "hunter2" not in refused.value.message
