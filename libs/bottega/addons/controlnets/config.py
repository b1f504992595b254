"""The worker's settings for ControlNets. The module imports no torch, because the worker's front reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetsConfig:
    """Settings for ControlNets in a worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    former_engine_keys: ClassVar[Mapping[str, str]] = {
        "controlnet_budget_bytes": "controlnets.budget_bytes",
        "controlnet_silence_s": "controlnets.silence_s",
    }
    """Former keys of the engine's settings, and the keys here that replaced them."""

    folders: dict[str, str] = field(default_factory=dict)
    """Folders of ControlNets, by name, that the worker runs itself when no ControlNet server hosts them."""
    budget_bytes: AtLeastOne = 8 << 30
    """Maximum bytes of ControlNet weights that the worker itself loads at the same time."""
    silence_s: Seconds = 5.0
    """Seconds without a message after which a ControlNet server counts as dead."""
