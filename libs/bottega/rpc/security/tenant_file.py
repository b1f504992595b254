"""The file of a gateway's tenants: their names, quotas, and the hashes of their API keys.

`bottega tenants` writes it, and gateways read it. It is replaced atomically. Only its owner may write it, because
a writer can create keys. A gateway under systemd has its own user, which may read a file that root owns
through the group GROUP.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import fcntl
import grp
import json
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field

from bottega.config import parse
from bottega.errors import ConfigError
from bottega.outside_rules import MAX_URL_BYTES
from bottega.rpc.security.api_keys import KeyParts, hashed
from bottega.rpc.security.caller import ALL_GRANTED, LEAST_WEIGHT, MOST_WEIGHT, Grants
from bottega.rpc.security.private_files import FileAccess, check_private, write_file
from bottega.state_folder import make_missing
from bottega.strict import STRICT

# Like host names, so that they are usable in logs, metrics and file names.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
NAME_RULE = "1 to 63 of a-z, 0-9 and -, which is neither the first nor the last"
MAX_TENANTS = 4096
# Room for all tenants, each with two keys and some hundred granted names.
_MAX_CHARACTERS = 32 << 20
GROUP = "bottega-tenants"
"""Group of the gateway's unit, created by deploy/install.sh. It may read a file of tenants that root owns."""
# The current key and the previous one, for the time in which callers change to the new one.
_MAX_KEYS = 2

MAX_WEBHOOK_SECRETS = 2
"""The current secret for webhooks and the previous one, while receivers change to the new one."""
WebhookEventName = Literal["job.completed", "job.failed", "job.cancelled"]
"""A type of webhook events."""
WEBHOOK_EVENTS: tuple[WebhookEventName, ...] = get_args(WebhookEventName)
_WEBHOOK_URL = re.compile("https?://[!-~]+")
_SECRET_BYTES = 32
_SECRET_PREFIX = "whsec_"

_Hex16 = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Hex64 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

_Most = Annotated[int, Field(ge=0, le=1 << 50)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The quotas of one tenant; 0 means no bound."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    concurrent: _Most = 0
    """Upper bound on jobs that run at the same time. Its other jobs wait without delaying other tenants."""
    queued: _Most = 0
    """Upper bound on waiting jobs."""
    per_minute: _Most = 0
    """Upper bound on new jobs in any minute."""
    per_day: _Most = 0
    """Upper bound on new jobs per day (UTC)."""
    stored_bytes: _Most = 0
    """Upper bound on the bytes of its jobs' stored pictures, and of the latents that are kept for edits."""
    calls: _Most = 0
    """Upper bound on unary calls that one gateway serves at the same time."""
    streams: _Most = 0
    """Upper bound on calls with streams of answers that one gateway serves at the same time."""


UNBOUNDED = Quotas()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey:
    """The stored part of an API key: its ID and the hash of its secret."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    key_id: _Hex16
    """The public ID of the key."""
    hash: _Hex64
    """Hash of the secret; see `api_keys.hashed`."""

    @classmethod
    def of(cls, parts: KeyParts) -> TenantKey:
        """Return the entry of the tenant file for an API key: its ID and the hash of its secret."""
        return cls(key_id=parts.key_id, hash=hashed(parts.secret))


def _is_webhook_secret(secret: str) -> str:
    try:
        size_bytes = len(base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True))
    except binascii.Error:
        size_bytes = 0
    # The bounds of Standard Webhooks.
    if not secret.startswith(_SECRET_PREFIX) or not 24 <= size_bytes <= 64:
        raise ValueError(f"a secret for webhooks is {_SECRET_PREFIX} and 24 to 64 bytes in base64")
    return secret


def _is_webhook_url(url: str) -> str:
    if url and not _WEBHOOK_URL.fullmatch(url):
        raise ValueError("a URL of a webhook must begin with https:// or http://, and has no spaces")
    return url


def new_webhook_secret() -> str:
    """Return a random secret that signs webhooks."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantWebhooks:
    """The webhook of a tenant's jobs that name none of their own, and the secrets that sign all of its webhooks."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    url: Annotated[str, Field(max_length=MAX_URL_BYTES), AfterValidator(_is_webhook_url)] = ""
    """Where the ends of jobs are announced; empty for nowhere."""
    events: tuple[WebhookEventName, ...] = ()
    """Types of events to announce; empty means all."""
    secrets: Annotated[
        tuple[Annotated[str, AfterValidator(_is_webhook_secret)], ...], Field(max_length=MAX_WEBHOOK_SECRETS)
    ] = field(default=(), repr=False)
    """Valid secrets, newest first. Each webhook is signed with all of them."""

    def rotated(self, *, keep_old: bool) -> TenantWebhooks:
        """Return the webhooks with a new secret. The previous secret still signs, too, if `keep_old` is set."""
        old = self.secrets[: MAX_WEBHOOK_SECRETS - 1] if keep_old else ()
        return dataclasses.replace(self, secrets=(new_webhook_secret(), *old))


NO_WEBHOOKS = TenantWebhooks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A customer of the suite: a name, its API keys, its share of the workers, and its permissions and quotas."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=63, pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    keys: Annotated[tuple[TenantKey, ...], Field(max_length=_MAX_KEYS)] = ()
    """Valid keys, newest first."""
    disabled: bool = False
    """Whether its keys are refused for now."""
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Weight of its share while jobs of several tenants wait: with 3 it gets three times as much as with 1."""
    quotas: Quotas = UNBOUNDED
    grants: Grants = ALL_GRANTED
    webhooks: TenantWebhooks = NO_WEBHOOKS

    def rotated(self, parts: KeyParts, *, keep_old: bool) -> Tenant:
        """Return the tenant with a new key. The previous key stays valid if `keep_old` is set."""
        old = self.keys[: _MAX_KEYS - 1] if keep_old else ()
        return dataclasses.replace(self, keys=(TenantKey.of(parts), *old))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)] = ()


def is_tenant_name(name: str) -> bool:
    """Return whether a name is valid for a tenant; see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """Read the tenants in a file. Raises ConfigError if it is missing, damaged, or writable by other users."""
    try:
        with path.open(encoding="utf-8") as file:
            check_private(path, os.fstat(file.fileno()), group_may_read=True)
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(f"{path} is no file of tenants: it is longer than {_MAX_CHARACTERS >> 20} Mi characters")
        return parsed_tenants(json.loads(text), source=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; create it with: bottega tenants add NAME --file {path}") from None
    except PermissionError:
        raise ConfigError(
            f"{path} cannot be read by this user; as root: chgrp {GROUP} {path} && chmod 640 {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of JSON and of its encoding
        raise ConfigError(f"{path} is not a valid file of tenants: {error}") from None


def parsed_tenants(contents: object, *, source: str) -> tuple[Tenant, ...]:
    """Return the tenants in parsed JSON. Raises ConfigError, which names the source, if they are not valid."""
    tenants = parse(_Contents, contents, source=source).tenants
    if len({tenant.name for tenant in tenants}) != len(tenants):
        raise ConfigError(f"{source} contains a tenant twice")
    return tenants


def change_tenants(path: Path, change: Callable[[tuple[Tenant, ...]], tuple[Tenant, ...]]) -> None:
    """Replace the tenants in a file, under a lock. A missing file is created. Raises ConfigError.

    Args:
        change: Returns the new tenants, given the old ones. If it raises, nothing is changed.
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
            parsed_tenants(json.loads(text), source="the new file of tenants")  # dataclasses.replace checks nothing
            write_file(path, text.encode(), _access_to(path))
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _access_to(path: Path) -> FileAccess:
    """Return the owner, group and mode for the file that replaces `path`, taken from the old file.

    If root writes a file that it owns and that no group may read yet, the gateway's group gets read access.
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
