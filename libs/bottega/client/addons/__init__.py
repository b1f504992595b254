"""What the client offers for each add-on service: every package beside this file is one.

Its `addon.ADD_ON` says what people call it, and its client module has the methods that bottega.client.sdk.clients
gives to the clients. The package of the same name in bottega.client.cli is its part of the command. A new add-on is
named nowhere but in bottega.client.sdk.clients.
"""

from __future__ import annotations

import pkgutil


def add_on_names() -> tuple[str, ...]:
    """Names of the packages, in their order."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.ispkg))
