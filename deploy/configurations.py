"""Writes a commented configuration for each service of the manifest: `python deploy/configurations.py [FOLDER]`.

Every key is there with its default and its description. Keys that a service's example sets are set. The others are
comments, "#key: value", so that they follow the defaults of later releases until an operator sets them.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from bottega.config import ConfigKey, keys_of, parse
from bottega.manifest import ServiceSpec, load_object, read_services

CONFIGURATIONS = Path(__file__).resolve().parent / "config"
_WIDTH = 118
_INDENT = "  "


def file_name(service: ServiceSpec) -> str:
    """Return the name of a service's file; for a service with several instances, that of the instance `miniature`."""
    return f"{service.kind}s/miniature.yaml" if service.count else f"{service.kind}.yaml"


def config_text(service: ServiceSpec) -> str:
    """Return the commented configuration of a service."""
    defaults = parse(load_object(service.config), {}, source="defaults")
    unit = f"bottega-{service.kind}{'@miniature' if service.count else ''}"
    head = (
        f"Configuration of the {service.title}. Every key is listed with its default. To set a key, remove the # "
        f"before it, check this file with `bottega config check` and run `systemctl restart {unit}`. With an unknown "
        "key or an invalid value the service does not start, and the error names the key."
    )
    return "".join(f"{line}\n" for line in [*_comment(head, ""), "", *_keys(defaults, service.example)])


def _keys(defaults: object, example: Mapping[str, object]) -> Iterator[str]:
    section: tuple[str, ...] = ()
    explanation = ""
    for key in keys_of(defaults):
        if key.path[:-1] != section:
            previous, section = section, key.path[:-1]
            yield ""
            for depth, name in enumerate(section):
                if previous[: depth + 1] != section[: depth + 1]:
                    yield f"{_INDENT * depth}{name}:"
        indent = _INDENT * len(section)
        if key.explanation != explanation:
            yield from _comment(key.explanation, indent)
            explanation = key.explanation
        yield from _setting(key, example, indent)


def _setting(key: ConfigKey, example: Mapping[str, object], indent: str) -> Iterator[str]:
    is_set = key.path[0] in example
    value = example[key.path[0]] if is_set else key.value
    if is_set:
        lines = yaml.safe_dump({key.path[-1]: value}, sort_keys=False, width=_WIDTH).splitlines()
        yield from (f"{indent}{line}" for line in lines)
    else:
        text = yaml.safe_dump({key.path[-1]: value}, sort_keys=False, width=1000, default_flow_style=True)
        yield f"{indent}#{text.strip()[1:-1]}"


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)


def main() -> None:
    """Write the configuration of each service that has one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else CONFIGURATIONS
    for service in read_services():
        if service.config:
            path = folder / file_name(service)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(config_text(service), encoding="utf-8")


if __name__ == "__main__":
    main()
