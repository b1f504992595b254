"""Writes Grafana's dashboard of the suite from its panels: `python deploy/dashboard.py [FILE]`.

grafana/panels.yml defines the panels. Format: Grafana's dashboard JSON model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GRAFANA = Path(__file__).resolve().parent / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "bottega.json"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Columns and heights in Grafana's grid.
_COLUMNS, _STAT_HEIGHT, _HEIGHT = 24, 4, 8
# The schema of Grafana 10, which later versions read.
_SCHEMA = 39


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of panels.yml."""

    title: str
    what: str
    """Its description."""
    unit: str
    queries: Mapping[str, str]
    """PromQL queries by legend."""
    stat: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with its panels, in rows of `across`."""

    title: str
    across: int
    panels: tuple[Panel, ...]


def read_sections() -> list[Section]:
    """Return the sections of panels.yml."""
    read = yaml.safe_load((GRAFANA / "panels.yml").read_text(encoding="utf-8"))
    return [Section(**{**each, "panels": tuple(Panel(**panel) for panel in each["panels"])}) for each in read]


def dashboard_text() -> str:
    """Return the dashboard as Grafana's JSON."""
    dashboard = {
        "uid": "bottega",
        "title": "Bottega",
        "tags": ["bottega"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_CHOICE_OF_DATASOURCE]},
        "panels": list(_panels(read_sections())),
    }
    return f"{json.dumps(dashboard, indent=2)}\n"


_CHOICE_OF_DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _panels(sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    top, number = 0, 0
    for section in sections:
        number += 1
        at = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": section.title, "gridPos": at, "panels": []}
        top += 1
        width = _COLUMNS // section.across
        height = _STAT_HEIGHT if section.panels[0].stat else _HEIGHT
        for place, panel in enumerate(section.panels):
            number += 1
            row, column = divmod(place, section.across)
            at = {"x": column * width, "y": top + row * height, "w": width, "h": height}
            yield {"id": number, "gridPos": at, **_panel(panel)}
        top += height * -(-len(section.panels) // section.across)


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if not panel.stat:
        defaults["custom"] = _STACKED if panel.stacked else _LINES
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": promql,
                "legendFormat": legend or panel.title,
                "instant": panel.stat,
                "range": not panel.stat,
            }
            for number, (legend, promql) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _STAT_OPTIONS if panel.stat else _LINE_OPTIONS,
    }


_LINES = {"drawStyle": "line", "showPoints": "never", "spanNulls": True}
_STACKED = {**_LINES, "fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
_LINE_OPTIONS = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
_STAT_OPTIONS = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name", "colorMode": "none"}


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else DASHBOARD).write_text(dashboard_text(), encoding="utf-8")
