"""The file in which a gateway's tenants stand: their names, and what is kept of their API keys.

`bottega tenants` writes it, gateways read it. It is replaced as a whole, so that no reader sees half of it, and whoever
may write it may make keys: so nobody but its owner may. A gateway under systemd is a user of its own that may read what
root writes, by the group GROUP, and may change nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import grp
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.config import parse
from bottega.errors import ConfigError
from bottega.rpc.security.api_keys import KeyParts, hashed
from bottega.rpc.security.grants import ALL_GRANTED, Grants
from bottega.rpc.security.private_files import FileAccess, check_private, write_file
from bottega.rpc.security.quotas import UNBOUNDED, Quotas
from bottega.rpc.security.weights import LEAST_WEIGHT, MOST_WEIGHT
from bottega.state_folder import make_missing
from bottega.strict import STRICT

# As names of hosts, so that they are told apart in logs, metrics and files.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
NAME_RULE = "1 to 63 of a-z, 0-9 and -, which is neither the first nor the last"
MAX_TENANTS = 4096
# All tenants with two keys and some hundred names that they may use.
_MAX_CHARACTERS = 32 << 20
GROUP = "bottega-tenants"
"""The group of the gateway's unit, as deploy/install.sh makes it: it may read a file of tenants that root writes."""
# The current key and the one before it, for the time in which callers go over to the new one.
_MAX_KEYS = 2

_Hex16 = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Hex64 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey:
    """What is kept of an API key. key_id: its public part. hash: of its secret, see `api_keys.hashed`."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    key_id: _Hex16
    hash: _Hex64

    @classmethod
    def of(cls, parts: KeyParts) -> TenantKey:
        """What is kept of a key."""
        return cls(key_id=parts.key_id, hash=hashed(parts.secret))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant. keys: those that are good, the newest first. disabled: none of them is for now.

    weight: of its share while the jobs of several tenants wait: with 3 it gets three times what one with 1 gets.
    quotas: what it may have at most. grants: what it may use of that which is for all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=63, pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    keys: Annotated[tuple[TenantKey, ...], Field(max_length=_MAX_KEYS)] = ()
    disabled: bool = False
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    quotas: Quotas = UNBOUNDED
    grants: Grants = ALL_GRANTED

    def rotated(self, parts: KeyParts, *, keep_old: bool) -> Tenant:
        """With a new key; the one before it stays good if keep_old says so."""
        old = self.keys[: _MAX_KEYS - 1] if keep_old else ()
        return dataclasses.replace(self, keys=(TenantKey.of(parts), *old))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)] = ()


def is_tenant_name(name: str) -> bool:
    """Whether it can be a tenant's; see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """Return the tenants of a file. Raise ConfigError if it is missing, damaged, or writable for others."""
    try:
        with path.open(encoding="utf-8") as file:
            check_private(path, os.fstat(file.fileno()), group_may_read=True)
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(f"{path} is no file of tenants: it is longer than {_MAX_CHARACTERS >> 20} Mi characters")
        contents = parse(_Contents, json.loads(text), source=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; make it with: bottega tenants add NAME --file {path}") from None
    except PermissionError:
        raise ConfigError(
            f"{path} cannot be read by this user; as root: chgrp {GROUP} {path} && chmod 640 {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of JSON and of its encoding
        raise ConfigError(f"{path} is no file of tenants: {error}") from None
    names = [tenant.name for tenant in contents.tenants]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path} has a tenant twice")
    return contents.tenants


def change_tenants(path: Path, change: Callable[[tuple[Tenant, ...]], tuple[Tenant, ...]]) -> None:
    """Replaces what is in the file, which is made where it is missing. Of two changes one comes after the other.

    change: may raise, and nothing is changed then. Raises ConfigError.
    """
    try:
        make_missing(path.parent)
        lock = os.open(
            path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = read_tenants(path) if path.exists() else ()
            text = json.dumps(dataclasses.asdict(_Contents(tenants=change(before))), indent=1) + "\n"
            write_file(path, text.encode(), _access_to(path))
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _access_to(path: Path) -> FileAccess:
    """Return who may use the file when it is replaced: those who could before, and the group of a gateway's unit.

    That group is added where root writes a file of its own, and no group may read it yet.
    """
    try:
        before = path.stat()
    except FileNotFoundError:
        owner, group, shared = os.geteuid(), -1, False
    else:
        owner, group, shared = before.st_uid, before.st_gid, bool(before.st_mode & stat.S_IRGRP)
    if os.geteuid() != 0:
        return FileAccess(mode=0o600)
    if not shared and owner == 0:
        with contextlib.suppress(KeyError):
            group, shared = grp.getgrnam(GROUP).gr_gid, True
    return FileAccess(mode=0o640 if shared else 0o600, owner=owner, group=group)
