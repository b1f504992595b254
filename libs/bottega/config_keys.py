"""Lists the keys of a configuration with value, explanation and line in the file, and masks secrets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import yaml

KeyPath = tuple[str, ...]

MASK = "********"

_SECRET = re.compile(r"(^|_)(secret|password|passphrase|token|credential|api_key|private_key)s?$")
# A user and a password before the host of an address.
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """A key of a configuration with its value."""

    path: KeyPath
    """Names of the sections and the key, from the top level."""
    value: object
    explanation: str
    """The field's docstring in one line; empty if the field has none."""

    @property
    def name(self) -> str:
        """Names of the sections and the key, joined by dots."""
        return ".".join(self.path)

    def shown(self) -> object:
        """Return the value to print, with secrets masked."""
        return masked(self.path, self.value)


def keys_of(config: object, section: KeyPath = ()) -> Iterator[ConfigKey]:
    """Yield every key in the order of the fields, with the keys of nested dataclasses."""
    texts = explanations(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if _is_section(value):
            yield from keys_of(value, (*section, field.name))
        else:
            yield ConfigKey(path=(*section, field.name), value=value, explanation=texts.get(field.name, ""))


def explanations(kind: type[object]) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, in one line, including inherited fields."""
    found: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if dataclasses.is_dataclass(ancestor):
            properties = pydantic.TypeAdapter(ancestor).json_schema()["properties"]
            texts = {name: item.get("description", "") for name, item in properties.items()}
            found |= {name: " ".join(text.split()) for name, text in texts.items() if text}
    return found


def lines_of(file: Path) -> dict[KeyPath, int]:
    """Return the line of each key and section that a YAML file sets.

    Raises:
        OSError: The file cannot be read.
        yaml.YAMLError: The file is not YAML.
    """
    node = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    return dict(_lines(node, ())) if node else {}


def masked(path: KeyPath, value: object) -> object:
    """Return `value`, with secrets in it replaced by `MASK`.

    Args:
        path: Names of the sections and the key, which determine what is secret.
    """
    if any(_SECRET.search(part) for part in path):
        return MASK if value else value
    if isinstance(value, dict):
        return {name: masked((*path, str(name)), item) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(path, item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key.path[-1]: masked(key.path, key.value) for key in keys_of(value, path)}
    return _USER_INFO.sub(MASK, value) if isinstance(value, str) else value


def _is_section(value: object) -> bool:
    return dataclasses.is_dataclass(value)


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        entries: list[tuple[Any, yaml.Node]] = node.value
        for key, value in entries:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
