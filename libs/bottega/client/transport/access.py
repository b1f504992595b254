"""The API key that a client shows to its gateway: where it is found, and whether it can be one."""

from __future__ import annotations

import os

from bottega.errors import InvalidRequest, Violation
from bottega.rpc.security.api_keys import parse_key

KEY_VARIABLE = "BOTTEGA_API_KEY"


def default_key() -> str:
    """From the environment; empty is none."""
    return os.environ.get(KEY_VARIABLE, "").strip()


def checked_key(key: str) -> str:
    """The key, or "" for none. Raises InvalidRequest for what is none, without showing it."""
    if key and parse_key(key) is None:
        rule = "must be btg_, 16 hexadecimal digits, _ and 64 more, as `bottega tenants add` shows it once"
        raise InvalidRequest(f"api_key: {rule}", violations=[Violation(field="api_key", description=rule)])
    return key
