"""Names of the kinds of services that several packages refer to.

A service states its kind when it joins the fleet. Kinds that only one package refers to need no entry here.
"""

from __future__ import annotations

import re

GATEWAY = "gateway"
WORKER = "worker"
CONTROLNET = "controlnet"
LORAS = "loras"
CACHE = "cache"
ACTIVATIONS = "activations"
SCALE = "scale"
# Workers with one stage (the text encoders, or the VAE's decoder), asked by workers that lack it.
ENCODE = "encode"
DECODE = "decode"
STAGES = (ENCODE, DECODE)

# A kind also names processes, folders, systemd units and a label of metrics.
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")


def is_kind(text: str) -> bool:
    """Return whether the text is a valid name of a kind."""
    return _KIND.fullmatch(text) is not None
