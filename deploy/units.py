"""Writes the systemd unit of each service in the manifest from `service.template`: `python deploy/units.py [FOLDER]`.

A line of the template that begins with "?NAME " is for services to which NAME applies. Services of other manifests
(BOTTEGA_SERVICES) get their units as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bottega.manifest import ServiceSpec, read_services

DEPLOY = Path(__file__).resolve().parent
UNITS = DEPLOY / "systemd"


def unit_name(service: ServiceSpec) -> str:
    """Return the name of a service's unit; a template unit for a service with several instances."""
    return f"bottega-{service.kind}{'@' if service.count else ''}.service"


def unit_text(service: ServiceSpec) -> str:
    """Return the unit of a service."""
    unit, many = service.unit, service.count is not None
    applies = {
        "joins": service.joins,
        "slow": bool(unit.start_s),
        "links": unit.links,
        "tenants": unit.tenants,
        "device": unit.on_device,
        "reads": unit.reads_models,
        "root": unit.starts_units,
    }
    marks = {f"?{name} " if holds else f"?no-{name} " for name, holds in applies.items()}
    lines = []
    for line in (DEPLOY / "service.template").read_text(encoding="utf-8").splitlines(keepends=True):
        mark = line[: line.find(" ") + 1] if line.startswith("?") else ""
        if not mark or mark in marks:
            lines.append(line.removeprefix(mark))
    return "".join(lines).format(
        title=f"{service.title} %i" if many else service.title,
        module=service.module,
        config=f"{service.kind}s/%i" if many else service.kind,
        folder=f"bottega-{service.kind}/%i" if many else f"bottega-{service.kind}",
        start_s=unit.start_s,
    )


def main() -> None:
    """Write all units."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else UNITS
    for service in read_services():
        (folder / unit_name(service)).write_text(unit_text(service), encoding="utf-8")


if __name__ == "__main__":
    main()
