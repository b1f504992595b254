"""Who calls, by the keys of a file that changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import ConfigError, Unauthenticated
from bottega.gateway.tenants.authenticator import TenantAuthenticator
from bottega.rpc.security.api_keys import bearer, new_key
from bottega.rpc.security.caller import Caller, Role
from bottega.rpc.security.tenant_file import Tenant, change_tenants
from tests.fakes.fake_time import FakeTime

SHOP = Caller(role=Role.TENANT, name="shop", tenant="shop")


def _write(file: Path, *, disabled: bool = False) -> str:
    key, parts = new_key()
    change_tenants(file, lambda _: (Tenant(name="shop", disabled=disabled).rotated(parts, keep_old=False),))
    return key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


async def test_a_key_names_its_tenant(file: Path) -> None:
    key = _write(file)
    known = TenantAuthenticator(file, FakeTime().clock())
    assert await known.authenticate((), [("user-agent", "x"), bearer(key)]) == SHOP


async def test_whatever_is_wrong_with_a_key_is_said_in_the_same_words(file: Path) -> None:
    key = _write(file)
    known = TenantAuthenticator(file, FakeTime().clock())
    said = set()
    for wrong in (new_key()[0], key[:-1] + ("1" if key[-1] == "0" else "0"), "nonsense", key + "0"):
        with pytest.raises(Unauthenticated) as refused:
            await known.authenticate((), [bearer(wrong)])
        said.add(refused.value.message)
        assert wrong not in refused.value.message
    assert len(said) == 1
    with pytest.raises(Unauthenticated, match="BOTTEGA_API_KEY"):
        await known.authenticate((), [])


async def test_it_knows_the_weights_of_tenants_as_they_are_now(file: Path) -> None:
    key, time = _write(file), FakeTime()
    known = TenantAuthenticator(file, time.clock())
    assert (known.weight("shop"), known.weight("nobody")) == (1.0, 1.0)
    change_tenants(file, lambda tenants: tuple(replace(tenant, weight=3.0) for tenant in tenants))
    time.now += 2.0
    await known.authenticate((), [bearer(key)])
    assert known.weight("shop") == 3.0


async def test_a_disabled_tenant_is_refused(file: Path) -> None:
    key = _write(file, disabled=True)
    with pytest.raises(Unauthenticated):
        await TenantAuthenticator(file, FakeTime().clock()).authenticate((), [bearer(key)])


async def test_a_rotated_key_ends_within_a_second(file: Path) -> None:
    time = FakeTime()
    old = _write(file)
    known = TenantAuthenticator(file, time.clock())
    new = _write(file)
    time.now += 1.0
    with pytest.raises(Unauthenticated):
        await known.authenticate((), [bearer(old)])
    assert await known.authenticate((), [bearer(new)]) == SHOP


async def test_a_file_that_breaks_later_changes_nothing(file: Path) -> None:
    time = FakeTime()
    key = _write(file)
    known = TenantAuthenticator(file, time.clock())
    for spoil in (lambda: file.write_text("{"), lambda: file.chmod(0o644), file.unlink):
        spoil()
        time.now += 1.0
        assert await known.authenticate((), [bearer(key)]) == SHOP
        with pytest.raises(Unauthenticated):
            await known.authenticate((), [bearer(new_key()[0])])


def test_a_gateway_does_not_start_without_its_file(file: Path) -> None:
    with pytest.raises(ConfigError, match="bottega tenants add"):
        TenantAuthenticator(file, FakeTime().clock())
