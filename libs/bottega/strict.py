"""Pydantic's settings for all configuration dataclasses.

The module does not import pydantic, which takes a quarter of a second that most commands do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ConfigDict

STRICT: ConfigDict = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}
"""Value of `__pydantic_config__` in configuration dataclasses and nested ones."""
