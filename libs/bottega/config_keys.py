"""Every key of a configuration: its value, what its dataclass's docstring says of it, and where a file sets it.

What is secret is masked here, for all that print a configuration. This module does not know which services there are.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str, ...]

MASK = "********"

_SECRET = re.compile(r"(^|_)(secret|password|passphrase|token|credential|api_key|private_key)s?$")
# A user and a password before the host of an address.
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """path: from the top level. explanation: from the docstring, one line; empty where it says nothing."""

    path: KeyPath
    value: object
    explanation: str

    @property
    def name(self) -> str:
        """As errors have it: sections and keys, with dots."""
        return ".".join(self.path)

    def shown(self) -> object:
        """The value, for people's eyes: a secret is masked."""
        return masked(self.path, self.value)


def keys_of(config: object, section: KeyPath = ()) -> Iterator[ConfigKey]:
    """All keys of a configuration, in the order of its fields; those of a nested dataclass stand below its name."""
    said = explanations(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if _is_section(value):
            yield from keys_of(value, (*section, field.name))
        else:
            yield ConfigKey(path=(*section, field.name), value=value, explanation=said.get(field.name, ""))


def explanations(kind: type[object]) -> dict[str, str]:
    """What the docstrings of a dataclass and of those that it extends say of its fields: "NAME: ..." or "A, B: ...".

    Each class explains the fields that it declares: "insecure: true" in what it says of another one is no entry.
    """
    found: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        names = inspect.get_annotations(ancestor)
        if not names:
            continue
        one = "|".join(sorted(names, key=len, reverse=True))
        heads = re.compile(rf"(?:^|(?<=\s))((?:{one})(?:, (?:{one}))*): ")
        text = " ".join(inspect.cleandoc(ancestor.__dict__.get("__doc__") or "").split())
        matches = list(heads.finditer(text))
        ends = [*(match.start() for match in matches), len(text)][1:]
        for match, end in zip(matches, ends, strict=True):
            found |= dict.fromkeys(match[1].split(", "), text[match.end() : end].strip())
    return found


def lines_of(file: Path) -> dict[KeyPath, int]:
    """The line of each key and section that a YAML file sets. Of a file that was loaded; raises OSError, YAMLError."""
    node = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    return dict(_lines(node, ())) if node else {}


def masked(path: KeyPath, value: object) -> object:
    """The value of the key at `path`, without what is secret."""
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
