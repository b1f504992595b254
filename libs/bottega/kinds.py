"""Kinds of services, as they join the fleet: the names of those that several packages refer to.

A kind needs no entry here: it is what services of that kind say when they join. What a service hosts for jobs has the
kind of the services that it comes from.
"""

from __future__ import annotations

import re

GATEWAY = "gateway"
WORKER = "worker"
CONTROLNET = "controlnet"
LORAS = "loras"
CACHE = "cache"
ACTIVATIONS = "activations"

# It names processes, folders, systemd units and a label of the metrics.
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")


def is_kind(text: str) -> bool:
    """Whether it can be the name of a kind."""
    return _KIND.fullmatch(text) is not None
