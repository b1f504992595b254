"""One way to read configuration: a YAML file into a service's one frozen dataclass.

An unknown key, one that is there twice, or a bad value refuses to start and names itself. A section without keys is as
if it were not there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import pydantic
import yaml

from bottega.config_keys import KeyPath, masked
from bottega.errors import ConfigError

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
        return pydantic.TypeAdapter(kind).validate_python(_without_empty_sections(kind, values))
    except pydantic.ValidationError as error:
        lines = [f"  {_key(item['loc'])}: {_rule(kind, item)}" for item in error.errors()]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(lines)) from None


def _read(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
        _check_for_doubles(path, yaml.compose(text), ())
        return yaml.safe_load(text) or {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None


def _check_for_doubles(path: Path, node: yaml.Node | None, section: KeyPath) -> None:
    """Of a key that is there twice YAML takes the last, and whoever edits the first wonders."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        here, line = (*section, str(key.value)), key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(f"{path} cannot be used:\n  {_key(here)}: twice, in lines {lines[key.value]} and {line}")
        lines[key.value] = line
        _check_for_doubles(path, value, here)


def _without_empty_sections(kind: type[object], values: object) -> object:
    """Without the names of sections that have nothing below them, as where all of their keys are comments."""
    if not (isinstance(values, Mapping) and dataclasses.is_dataclass(kind)):
        return values
    hints = get_type_hints(kind)
    return {
        name: _without_empty_sections(hints.get(name, object), value)
        for name, value in values.items()
        if not (value is None and dataclasses.is_dataclass(hints.get(name)))
    }


def _key(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(top level)"


def _rule(kind: type[object], item: Any) -> str:
    if item["type"] == "unexpected_keyword_argument":
        *sections, name = item["loc"]
        if renamed := _new_name(kind, sections, str(name)):
            return f"is called {renamed} now"
        return f"unknown key; known {_known(kind, sections)}"
    if item["type"] == "dataclass_type":
        return f"is a section: its keys stand below it, each in a line of its own (got {item['input']!r})"
    shown = masked(tuple(str(part) for part in item["loc"]), item["input"])
    return f"{item['msg']} (got {shown!r})"


def _new_name(kind: type[object], sections: Sequence[int | str], name: str) -> str:
    """Return what a key of an earlier version is called now, by its section's `renamed_keys`; empty for others."""
    renamed: Mapping[str, str] = getattr(_section(kind, sections), "renamed_keys", {})
    return renamed.get(name, "")


def _section(kind: type[object], sections: Sequence[int | str]) -> object:
    """Return the type of the innermost section; None where it has none of ours."""
    inner: object = kind
    for name in sections:
        inner = get_type_hints(inner).get(str(name)) if isinstance(inner, type) else None
    return inner


def _known(kind: type[object], sections: Sequence[int | str]) -> str:
    """Return the keys of the innermost section; those of the top level where that is no dataclass."""
    inner = _section(kind, sections)
    where = f"in {_key(tuple(sections))}" if sections and dataclasses.is_dataclass(inner) else "at the top level"
    keys = ", ".join(field.name for field in dataclasses.fields(inner if where.startswith("in ") else kind))  # type: ignore[arg-type]
    return f"{where}: {keys}"
