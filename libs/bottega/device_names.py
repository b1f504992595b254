"""What a configuration may call a device. It imports no torch: whether such a device is there, the engine finds out."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_SERVED = re.compile(r"auto|cpu|cuda(:\d+)?")
# Known to torch, so that people try them; nothing here has run on one.
_OTHERS = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs", "hip": "AMD's GPUs by that name"}


def check_device_name(name: str) -> str:
    """The name. Raises ValueError, a sentence, for what nothing here computes on."""
    if _SERVED.fullmatch(name):
        return name
    kind = name.partition(":")[0]
    if kind in _OTHERS:
        raise ValueError(f"{_OTHERS[kind]} ({kind}) are not served; use cpu, or cuda:N on an NVIDIA GPU")
    raise ValueError(f"no device is called {name!r}; use auto, cpu, cuda or cuda:N")


DeviceName = Annotated[str, AfterValidator(check_device_name)]
"""auto, cpu, cuda or cuda:N."""
