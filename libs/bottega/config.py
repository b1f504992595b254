"""One way to read configuration: a YAML file into a service's one frozen dataclass.

An unknown key or a bad value refuses to start and names itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from bottega.errors import ConfigError

# Set on every config dataclass (`__pydantic_config__ = STRICT`), nested ones too.
STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)

ConfigT = TypeVar("ConfigT")


def load(kind: type[ConfigT], path: Path | None) -> ConfigT:
    """Reads `path` into the dataclass `kind`; without a path every field has its default.

    Raises ConfigError naming the file, the key and the rule, for every key that is wrong.
    """
    return parse(kind, _read(path) if path else {}, source=str(path or "defaults"))


def parse(kind: type[ConfigT], values: object, *, source: str) -> ConfigT:
    """Checks `values` (as YAML gives them) against the dataclass `kind`.

    source: what to call the origin of the values in an error.
    Raises ConfigError naming every key that is wrong.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        lines = [f"  {_key(item['loc'])}: {_rule(kind, item)}" for item in error.errors()]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(lines)) from None


def _read(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None


def _key(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(top level)"


def _rule(kind: type[object], item: Any) -> str:
    if item["type"] == "unexpected_keyword_argument":
        known = ", ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
        return f"unknown key; known at the top level: {known}"
    return f"{item['msg']} (got {item['input']!r})"
