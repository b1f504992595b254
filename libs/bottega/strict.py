"""What pydantic is told of every dataclass that can stand in a configuration file. Imports nothing: pydantic takes a
quarter of a second, which commands do without."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ConfigDict

# As `__pydantic_config__`, of nested ones too.
STRICT: ConfigDict = {"extra": "forbid", "allow_inf_nan": False}
