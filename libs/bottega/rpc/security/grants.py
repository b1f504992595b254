"""Models and adapters that a tenant may use, and bounds of its weight.

Imports little, because every command imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from bottega.strict import STRICT

MAX_GRANTED = 1024
MAX_NAME_CHARACTERS = 200
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
"""Bounds of a tenant's weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The names of shared models and adapters that a tenant may use. An empty list allows all of that kind.

    Raises ValueError for invalid names.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    """Names of shared LoRAs. A tenant may always use its own."""
    controlnets: tuple[str, ...] = ()
    """Names of shared ControlNets. A tenant may always use its own."""

    def __post_init__(self) -> None:
        for kind in (field.name for field in fields(self)):
            names = getattr(self, kind)
            if len(names) > MAX_GRANTED:
                raise ValueError(f"{kind} must have at most {MAX_GRANTED} names")
            if not all(0 < len(name) <= MAX_NAME_CHARACTERS for name in names):
                raise ValueError(f"names in {kind} must have 1 to {MAX_NAME_CHARACTERS} characters")


ALL_GRANTED = Grants()
