"""The file of tenants: what is kept of a key, who may touch the file, and changes at the same time."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.rpc.security import tenant_file
from bottega.rpc.security.api_keys import matches, new_key, parse_key, shown_key
from bottega.rpc.security.tenant_file import Tenant, change_tenants, read_tenants
from tests.support.other_user import GROUP, USER, needs_root

# Of the right shape.
KEY = f"btg_{16 * 'a'}_{64 * 'b'}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tenants.json"


def _add(file: Path, name: str) -> str:
    key, parts = new_key()
    change_tenants(file, lambda tenants: (*tenants, Tenant(name=name).rotated(parts, keep_old=False)))
    return key


def test_a_key_is_recognized_by_what_is_kept_of_it_which_does_not_give_it_back(file: Path) -> None:
    key = _add(file, "shop")
    parts = parse_key(key)
    assert parts is not None
    ((kept,),) = (tenant.keys for tenant in read_tenants(file))
    assert kept.key_id == parts.key_id
    assert matches(parts.secret, kept.hash)
    assert not matches("0" * 64, kept.hash)
    assert parts.secret not in file.read_text()


@pytest.mark.parametrize("text", ["", "btg_", "btg_0_0", "x" * 85, f"{KEY}0", KEY.upper()])
def test_what_is_no_key_has_no_parts(text: str) -> None:
    assert parse_key(text) is None


@pytest.mark.parametrize(("value", "key"), [("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("k", "")])
def test_a_key_is_shown_under_its_scheme(value: str, key: str) -> None:
    assert shown_key(value) == key


def test_a_rotated_key_replaces_the_others_unless_the_last_is_kept() -> None:
    first, second, third = (new_key()[1] for _ in range(3))
    tenant = Tenant(name="shop").rotated(first, keep_old=False).rotated(second, keep_old=True)
    assert [key.key_id for key in tenant.keys] == [second.key_id, first.key_id]
    both = tenant.rotated(third, keep_old=True)
    assert [key.key_id for key in both.keys] == [third.key_id, second.key_id]
    assert [key.key_id for key in tenant.rotated(third, keep_old=False).keys] == [third.key_id]


def test_the_file_is_its_owners_alone_and_is_refused_otherwise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_file, "GROUP", "no such group")
    _add(file, "shop")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for mode in (0o604, 0o620, 0o660, 0o644):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"chmod 6.0 {file}"):
            read_tenants(file)


@needs_root
def test_a_group_that_root_lets_read_the_file_may_still_read_it_after_a_change(file: Path) -> None:
    _add(file, "shop")
    os.chown(file, 0, GROUP)
    file.chmod(0o640)
    _add(file, "press")
    assert [tenant.name for tenant in read_tenants(file)] == ["shop", "press"]
    assert (file.stat().st_gid, stat.S_IMODE(file.stat().st_mode)) == (GROUP, 0o640)


@needs_root
def test_a_file_that_is_another_users_is_not_believed(file: Path) -> None:
    _add(file, "shop")
    os.chown(file, USER, GROUP)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_tenants(file)


def test_a_file_that_cannot_be_used_says_what_to_do(file: Path) -> None:
    with pytest.raises(ConfigError, match="bottega tenants add NAME --file"):
        read_tenants(file)
    _add(file, "shop")
    good = file.read_text()
    for text, why in (
        ("{", "not a (valid )?file of tenants"),
        (good.replace('"name"', '"nam"'), "tenants.0.nam"),
        (good.replace('"shop"', '"Shop"'), "tenants.0.name"),
        ('{"tenants": [{"name": "a"}, {"name": "a"}]}', "twice"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_tenants(file)


def test_changes_at_the_same_time_lose_nothing(file: Path) -> None:
    names = [f"tenant-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: _add(file, name), names))
    assert sorted(tenant.name for tenant in read_tenants(file)) == sorted(names)
    assert {left.name for left in file.parent.iterdir()} == {file.name, f".{file.name}.lock"}
