"""The panels of Grafana's dashboard, drawn from a Prometheus that watches a suite, where there is no Grafana.

    python -m load.dashboard_sheet deploy/grafana/dashboard.png --minutes 10

Prometheus computes the panels' series, uPlot (with which Grafana draws its lines) draws them in a page, and a headless
Chromium makes a picture of that. It needs both: `apt install chromium fonts-dejavu-core`, `npm install uplot`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.dashboard import Panel, Section, read_sections

_PAGE = Path(__file__).with_suffix(".html")
_STEPS = 240
_WIDTH = 1600
# Of the page's parts, in pixels; what is left over below is cut off.
_HEAD, _SECTION, _STAT, _CHART = 70, 45, 140, 267
_ANSWER_S = 30.0
_DRAW_S = 120.0


class Prometheus:
    """Answers of the Prometheus at `url`.

    Args:
        url: Its address.
        until: End of the time, in Unix seconds.
        minutes: Length of the time.
        rate_interval: Over which rates are computed, as Grafana would choose it.
    """

    def __init__(self, url: str, *, until: float, minutes: float, rate_interval: str) -> None:
        self._url = url
        self.end = until
        self.start = self.end - 60.0 * minutes
        self._rate_interval = rate_interval

    def panel(self, panel: Panel) -> dict[str, Any]:
        """Return the page's facts of a panel: times, and series with a value or null at each of them."""
        found: list[tuple[str, Mapping[float, float]]] = []
        for legend, promql in panel.queries.items():
            for series in self._query(promql):
                values = {float(at): float(value) for at, value in series["values"] if value != "NaN"}
                found.append((_name(legend or panel.title, series["metric"]), values))
        times = sorted({at for _, values in found for at in values})
        lines = [{"name": name, "values": [values.get(at) for at in times]} for name, values in found]
        facts = {name: getattr(panel, name) for name in ("title", "what", "unit", "stat", "stacked")}
        return {**facts, "times": times, "series": lines}

    def _query(self, promql: str) -> list[dict[str, Any]]:
        question = {
            "query": promql.replace("$__rate_interval", self._rate_interval),
            "start": self.start,
            "end": self.end,
            "step": max(1.0, (self.end - self.start) / _STEPS),
        }
        url = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(question)}"
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def page(sections: list[Section], prometheus: Prometheus, uplot: Path, *, subtitle: str) -> str:
    """Return the page with everything in it.

    Args:
        sections: Of the dashboard.
        prometheus: Answers for its panels.
        uplot: Folder of uPlot's files for browsers.
        subtitle: A line below the title.
    """
    drawn = [
        {
            "title": section.title,
            "across": section.across,
            "panels": [prometheus.panel(panel) for panel in section.panels],
        }
        for section in sections
    ]
    facts = {"title": "Bottega", "subtitle": subtitle, "start": prometheus.start, "end": prometheus.end}
    sheet = json.dumps({**facts, "sections": drawn}).replace("</", "<\\/")
    parts = {
        "STYLE": (uplot / "uPlot.min.css").read_text(encoding="utf-8"),
        "UPLOT": (uplot / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "SHEET": sheet,
    }
    text = _PAGE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part)
    return text


def main() -> None:
    """Draw, or name what is missing."""
    options = _options()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium here: apt install chromium")
    if not (options.uplot / "uPlot.iife.min.js").is_file():
        sys.exit(f"there is no uPlot in {options.uplot}: npm install uplot, and --uplot node_modules/uplot/dist")
    sections = read_sections()
    prometheus = Prometheus(
        options.prometheus, until=options.until, minutes=options.minutes, rate_interval=options.rate_interval
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page(sections, prometheus, options.uplot, subtitle=options.subtitle), encoding="utf-8")
        size = f"--window-size={_WIDTH},{_height(sections)}"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/browser",
            size,
        ]
        shot = [f"--screenshot={options.picture.absolute()}", file.as_uri()]
        subprocess.run([*command, *shot], check=True, capture_output=True, timeout=_DRAW_S)
    print(options.picture)


def _height(sections: list[Section]) -> int:
    return _HEAD + sum(
        _SECTION + -(-len(section.panels) // section.across) * (_STAT if section.panels[0].stat else _CHART)
        for section in sections
    )


def _name(legend: str, labels: Mapping[str, str]) -> str:
    """Return a legend as Grafana writes it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=15.0, help="of what happened")
    parser.add_argument("--until", type=float, default=time.time(), help="Unix seconds; default: now")
    parser.add_argument("--rate-interval", default="30s", help="over which rates are computed")
    parser.add_argument("--uplot", type=Path, default=Path("node_modules/uplot/dist"), help="folder of uPlot's files")
    parser.add_argument("--subtitle", default="", help="a line below the title, such as what ran where")
    return parser.parse_args()


if __name__ == "__main__":
    main()
