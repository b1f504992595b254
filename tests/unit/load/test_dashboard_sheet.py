"""The dashboard's panels, drawn without a Grafana: what a Prometheus answers, and the page that is made of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from deploy.dashboard import Panel, Section
from load.dashboard_sheet import Prometheus, page

SERIES = {
    "up": [
        {"metric": {"instance": "w1"}, "values": [[1.0, "2"], [2.0, "NaN"], [3.0, "4"]]},
        {"metric": {"instance": "w2"}, "values": [[2.0, "7.5"]]},
    ]
}


class _Answers(BaseHTTPRequestHandler):
    """What was asked is kept by the server."""

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.server.asked.append(asked)  # type: ignore[attr-defined]  # as the fixture made it
        result = SERIES.get(asked["query"], [])
        body = json.dumps({"status": "success", "data": {"result": result}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """It is no news."""


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as made:
        made.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def prometheus(server: Any) -> Prometheus:
    return Prometheus(f"http://127.0.0.1:{server.server_port}", until=1e9, minutes=2, rate_interval="30s")


def _panel(**queries: str) -> Panel:
    return Panel(title="Up", what="who is there", unit="short", queries=queries)


def test_series_have_a_value_or_none_at_all_times_and_are_named_as_grafana_names_them(prometheus: Prometheus) -> None:
    drawn = prometheus.panel(_panel(**{"of {{instance}}": "up"}))
    assert drawn["times"] == [1.0, 2.0, 3.0]
    assert drawn["series"] == [
        {"name": "of w1", "values": [2.0, None, 4.0]},
        {"name": "of w2", "values": [None, 7.5, None]},
    ]


def test_the_page_has_all_that_it_draws_in_itself(prometheus: Prometheus, tmp_path: Path) -> None:
    (tmp_path / "uPlot.min.css").write_text(".u-wrap {}")
    (tmp_path / "uPlot.iife.min.js").write_text("var uPlot;")
    text = page([Section(title="</script>", across=1, panels=(_panel(x="up"),))], prometheus, tmp_path, subtitle="here")
    assert not re.search(r"/\*[A-Z]+\*/", text)
    assert "src=" not in text
    assert text.count("</script>") == 2, "a title ends no script"
    assert all(part in text for part in (".u-wrap {}", "var uPlot;", '"who is there"', '"here"'))
