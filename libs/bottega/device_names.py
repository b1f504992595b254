"""Names of devices in configurations. Imports no torch, so that it does not know which devices exist."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_SERVED = re.compile(r"auto|cpu|cuda(:\d+)?")
# Devices that torch knows, so that people try them. The suite was never run on one.
_OTHERS = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs", "hip": "AMD's GPUs by that name"}


def check_device_name(name: str) -> str:
    """Return the name. Raise ValueError with a sentence for users if Bottega cannot compute on such a device."""
    if _SERVED.fullmatch(name):
        return name
    kind = name.partition(":")[0]
    if kind in _OTHERS:
        raise ValueError(f"{_OTHERS[kind]} ({kind}) are not served; use cpu, or cuda:N on an NVIDIA GPU")
    raise ValueError(f"no device is called {name!r}; use auto, cpu, cuda or cuda:N")


DeviceName = Annotated[str, AfterValidator(check_device_name)]
"""Name of a device: auto, cpu, cuda or cuda:N."""
