"""Reads a YAML configuration file into a service's frozen dataclass.

Unknown keys, duplicate keys and invalid values are errors that name the key. A section without keys is ignored. Files
must be plain YAML: anchors, aliases, merges, and files that are too long, deep or large are refused before they are
loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import pydantic
import yaml
from pydantic import AfterValidator

from bottega.errors import ConfigError

ConfigT = TypeVar("ConfigT")

# Many times the size of a configuration with every key: 16 KiB, 200 keys, 4 levels.
_MAX_BYTES = 256 << 10
_MAX_EVENTS = 20_000
_MAX_DEPTH = 16
_MAX_SCALAR_CHARACTERS = 4096
_MAX_INTEGER = 2**63 - 1
# Wrong keys that an error names, and characters of a value that it shows.
_MAX_NAMED = 32
_MAX_SHOWN_CHARACTERS = 200
_MERGE = "tag:yaml.org,2002:merge"

KeyPath = tuple[str, ...]

MASK = "********"

_SECRET = re.compile(r"(^|_)(secret|password|passphrase|token|credential|api_key|private_key)s?$")
# A user and a password before the host of an address. The password may have an @ that should have been escaped.
_USER_INFO = re.compile(r"(?<=://)[^/\s]+(?=@)")
# A password among the parameters of a URL.
_PASSWORD_PARAMETER = re.compile(r"(?<=password=)[^&\s]+")

_SERVED = re.compile(r"auto|cpu|cuda(:\d+)?")
# Devices that torch knows, so that people try them. The suite was never run on one.
_OTHERS = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs", "hip": "AMD's GPUs by that name"}


def load(kind: type[ConfigT], path: Path | None) -> ConfigT:
    """Return the configuration in a file as a dataclass of type `kind`; the defaults if `path` is None.

    Raises ConfigError, which names the file and, for every wrong key, the rule.
    """
    return parse(kind, _read(path) if path else {}, source=str(path or "defaults"))


def parse(kind: type[ConfigT], values: object, *, source: str) -> ConfigT:
    """Convert values, as loaded from YAML, to a dataclass of type `kind`. Raise ConfigError that names every wrong key.

    Args:
        source: Where the values are from, for errors.
    """
    try:
        config: ConfigT = _adapter(cast("Any", kind)).validate_python(_without_empty_sections(kind, values))
    except pydantic.ValidationError as error:
        wrong = error.errors()
        lines = [f"  {_key(item['loc'])}: {_rule(kind, item)}" for item in wrong[:_MAX_NAMED]]
        if len(wrong) > _MAX_NAMED:
            lines.append(f"  and {len(wrong) - _MAX_NAMED} more")
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(lines)) from None
    return config


@functools.cache
def _adapter(kind: type[Any]) -> pydantic.TypeAdapter[Any]:
    """Return the parser of a class, which takes milliseconds to build."""
    return pydantic.TypeAdapter(kind)


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _refused(path, f"is longer than {_MAX_BYTES >> 10} KiB, which no configuration is")
        text = data.decode("utf-8")
        _check_events(path, text)
        _check_for_doubles(path, yaml.compose(text, yaml.SafeLoader), ())
        values = yaml.safe_load(text) or {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: wrong dates, digits or encoding
        raise ConfigError(f"{path} is not YAML: {error}") from None
    _check_numbers(path, values, ())
    return values


def _check_events(path: Path, text: str) -> None:
    """Raise ConfigError for YAML that could take far more memory than its size, before it is loaded."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader), 1):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if getattr(event, "anchor", None) is not None:
            raise _refused(path, f"has an anchor or alias (& or *) in line {line}: write out what it stands for")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise _refused(path, f"nests more than {_MAX_DEPTH} deep in line {line}, as no configuration does")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_SCALAR_CHARACTERS:
            raise _refused(path, f"has a value of more than {_MAX_SCALAR_CHARACTERS} characters in line {line}")
        if number > _MAX_EVENTS:
            raise _refused(path, f"has more than {_MAX_EVENTS} keys and values, as no configuration has")


def _check_for_doubles(path: Path, node: yaml.Node | None, section: KeyPath) -> None:
    """Raise ConfigError for a duplicate key: YAML would use the last one, and an edit of the first have no effect."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_for_doubles(path, item, section)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise _refused(path, f"has a key in line {line} that is no text")
        if key.tag == _MERGE:
            raise _refused(path, f"merges sections (<<) in line {line}: write out the keys")
        here = (*section, key.value)
        if key.value in lines:
            raise ConfigError(f"{path} cannot be used:\n  {_key(here)}: twice, in lines {lines[key.value]} and {line}")
        lines[key.value] = line
        _check_for_doubles(path, value, here)


def _check_numbers(path: Path, value: object, section: KeyPath) -> None:
    """Raise ConfigError for an integer beyond 64 bits."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_numbers(path, item, (*section, str(name)))
    elif isinstance(value, list):
        for item in value:
            _check_numbers(path, item, section)
    elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise _refused(path, f"has a number beyond 64 bits: {_key(section)}")


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} {why}")


def _without_empty_sections(kind: type[object], values: object) -> object:
    """Return the values without empty sections, such as those whose keys are all comments."""
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
        known = f"known {_known(kind, item['loc'])} (got {_clipped(item['input'])})"
        return f"is a section: write its keys below it, each on its own line; {known}"
    shown = masked(tuple(str(part) for part in item["loc"]), item["input"])
    return f"{item['msg']} (got {_clipped(shown)})"


def _clipped(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def _new_name(kind: type[object], sections: Sequence[int | str], name: str) -> str:
    """Return the new name of a renamed key, from its section's `renamed_keys`; empty for others."""
    renamed: Mapping[str, str] = getattr(_section(kind, sections), "renamed_keys", {})
    return renamed.get(name, "")


def _section(kind: type[object], sections: Sequence[int | str]) -> object:
    """Return the type of the innermost section; None if it is not a section."""
    inner: object = kind
    for name in sections:
        inner = get_type_hints(inner).get(str(name)) if isinstance(inner, type) else None
    return inner


def _known(kind: type[object], sections: Sequence[int | str]) -> str:
    """Return the known keys of the innermost section as text; those of the top level if it is not a dataclass."""
    inner = _section(kind, sections)
    where = f"in {_key(tuple(sections))}" if sections and dataclasses.is_dataclass(inner) else "at the top level"
    keys = ", ".join(field.name for field in dataclasses.fields(inner if where.startswith("in ") else kind))  # type: ignore[arg-type]
    return f"{where}: {keys}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """A key of a configuration with its value."""

    path: KeyPath
    """Names of the sections and the key, from the top level."""
    value: object
    section: type[Any]
    """Dataclass that has the field."""

    @property
    def explanation(self) -> str:
        """The field's docstring in one line; empty if the field has none."""
        section: Any = self.section
        return explanations(section).get(self.path[-1], "")

    @property
    def name(self) -> str:
        """Names of the sections and the key, joined by dots."""
        return ".".join(self.path)

    def shown(self) -> object:
        """Return the value to print, with secrets masked."""
        return masked(self.path, self.value)


def keys_of(config: object, section: KeyPath = ()) -> Iterator[ConfigKey]:
    """Yield every key in the order of the fields, with the keys of nested dataclasses."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if _is_section(value):
            yield from keys_of(value, (*section, field.name))
        else:
            yield ConfigKey(path=(*section, field.name), value=value, section=type(config))


@functools.cache
def explanations(kind: type[Any]) -> Mapping[str, str]:
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
    return _PASSWORD_PARAMETER.sub(MASK, _USER_INFO.sub(MASK, value)) if isinstance(value, str) else value


def _is_section(value: object) -> bool:
    return dataclasses.is_dataclass(value)


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        entries: list[tuple[Any, yaml.Node]] = node.value
        for key, value in entries:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)


def check_device_name(name: str) -> str:
    """Return the name. Raise ValueError with a sentence for users if Bottega cannot compute on such a device."""
    if _SERVED.fullmatch(name):
        return name
    kind = name.partition(":")[0]
    if kind in _OTHERS:
        raise ValueError(f"{_OTHERS[kind]} ({kind}) are not served; use cpu, or cuda:N on an NVIDIA GPU")
    raise ValueError(f"no device is called {name!r}; use auto, cpu, cuda or cuda:N")


DeviceName = Annotated[str, AfterValidator(check_device_name)]
"""Name of a device: auto, cpu, cuda or cuda:N."""
