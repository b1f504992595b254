"""Reads the manifest, the list of services in the order in which they start.

A line names a Python module with a `SPEC` in it; "#" begins a comment. Services that are not part of Bottega are listed
in manifests of their own, whose paths are in BOTTEGA_SERVICES.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bottega.errors import ConfigError, ServicesMissing
from bottega.kinds import is_kind
from bottega.manifest.spec import ServiceOption, ServiceSpec

MANIFEST = Path(__file__).with_name("services.txt")
"""The manifest of Bottega's own services."""

VARIABLE = "BOTTEGA_SERVICES"
"""Environment variable with the manifests of other services, separated like the paths in PATH."""


def read_services() -> tuple[ServiceSpec, ...]:
    """Return the services that a suite of this machine has.

    Raises:
        ServicesMissing: Bottega's own are not installed.
        ConfigError: A manifest cannot be used; it names the line.
    """
    others = os.environ.get(VARIABLE, "").split(os.pathsep)
    return _read((MANIFEST, *(Path(path) for path in others if path)))


def options_of(services: tuple[ServiceSpec, ...]) -> Iterator[ServiceOption]:
    """Yield the options that `bottega up` offers for these services."""
    for service in services:
        if service.count:
            yield service.count
        yield from service.options


def missing_packages(service: ServiceSpec) -> list[str]:
    """Return what a service requires and is not installed here."""
    return [name for name in service.requires if not _is_installed(name)]


def load_object(path: str) -> Any:
    """Return the object that a spec names as "MODULE:NAME". Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a module of another project may raise anything
        raise ConfigError(f"{path}, which a service's spec names, cannot be imported: {error}") from None


@functools.lru_cache
def _read(manifests: tuple[Path, ...]) -> tuple[ServiceSpec, ...]:
    found: dict[str, ServiceSpec] = {}
    options: set[str] = set()
    for where, module in _lines(manifests):
        spec = _load(where, module)
        if not is_kind(spec.kind) or spec.kind in found:
            raise ConfigError(f"{where}: {spec.kind!r} is no name for a kind of service, or another one has it")
        named = {option.name for option in options_of((spec,))}
        if named & options:
            raise ConfigError(f"{where}: another service has the option {', '.join(sorted(named & options))} already")
        options |= named
        found[spec.kind] = spec
    return tuple(found.values())


def _lines(manifests: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    for manifest in manifests:
        try:
            lines = manifest.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the manifest {manifest} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if module := line.partition("#")[0].strip():
                yield f"{manifest}, line {number}", module


def _load(where: str, module: str) -> ServiceSpec:
    try:
        spec = importlib.import_module(module).SPEC
    except ModuleNotFoundError as error:
        if where.startswith(f"{MANIFEST},") and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ServicesMissing(
                "this needs bottega-services, which is not installed: "
                "pip install 'bottega-services[activations,cache,controlnet,gateway,loras,worker]'"
            ) from None
        raise ConfigError(f"{where}: {module} cannot be imported: {error}") from None
    except Exception as error:  # noqa: BLE001 - a module of another project may raise anything
        raise ConfigError(f"{where}: {module} cannot be imported: {error}") from None
    if not isinstance(spec, ServiceSpec):
        raise ConfigError(f"{where}: SPEC of {module} is no ServiceSpec")
    return spec


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
