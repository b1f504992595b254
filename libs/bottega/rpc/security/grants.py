"""What a tenant may use of that which is there for all tenants. Imports little: every command has it from `caller`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from bottega.strict import STRICT

MAX_GRANTED = 1024
MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Of one tenant, by name; no names of a kind are all of that kind. Raises ValueError for what are no names.

    loras, controlnets: beside its own, which no list is needed for.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    controlnets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """What is read from a file may be anything."""
        for kind in (field.name for field in fields(self)):
            names = getattr(self, kind)
            if len(names) > MAX_GRANTED:
                raise ValueError(f"{kind} has at most {MAX_GRANTED} names")
            if not all(0 < len(name) <= MAX_NAME_CHARACTERS for name in names):
                raise ValueError(f"{kind} has names of 1 to {MAX_NAME_CHARACTERS} characters")


ALL_GRANTED = Grants()
