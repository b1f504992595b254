"""What a tenant may use of that which is there for all tenants. Imports little: commands show it in their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.config import STRICT

MAX_GRANTED = 1024
MAX_NAME_CHARACTERS = 200
_Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)], ...], Field(max_length=MAX_GRANTED)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Of one tenant, by name; no names of a kind are all of that kind.

    loras, controlnets: beside its own, which no list is needed for.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    models: _Names = ()
    loras: _Names = ()
    controlnets: _Names = ()


ALL_GRANTED = Grants()
