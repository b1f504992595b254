"""The client's part of each add-on service: every package beside this file is one.

Its `client` module has `ADD_ON`, a description for people, and the methods that bottega.client.sdk.clients adds to the
clients. Its `cli` module has the subcommands, `PART` (options of `bottega generate` and `bottega edit`) and
`advice_for` (what to do about its errors). Only bottega.client.sdk.clients lists the add-ons by name.
"""

from __future__ import annotations

import pkgutil


def add_on_names() -> tuple[str, ...]:
    """Return the names of the add-ons, in alphabetical order."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.ispkg))
