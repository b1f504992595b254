"""What a Prometheus sees of services as they really run: all that the dashboard and the alerts name."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request

import pytest

from bottega.client import Client
from bottega.gateway.api.fleet_service import TARGETS_PATH
from tests.e2e.conftest import Suite
from tests.support.deployed_metrics import assert_shows_what_is_named, scrape
from tests.support.services import Service
from tests.support.waiting import wait_until

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool here (Debian: apt install prometheus)"
)


@pytest.fixture(params=["gateway", "worker", "loras", "http"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def scraped(kind: str, suite: Suite, http: Service, client: Client) -> str:
    """Of a service that has been at work."""
    client.generate("a red star", num_inference_steps=2)
    services = {"gateway": suite.gateway, "worker": suite.worker, "loras": suite.store, "http": http}
    return scrape(services[kind].metrics)


def test_a_scrape_has_what_dashboard_and_alerts_name_and_says_nothing_of_users(kind: str, scraped: str) -> None:
    assert_shows_what_is_named(kind, scraped)


@needs_promtool
def test_prometheus_own_check_finds_nothing_in_a_scrape(scraped: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=scraped, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_prometheus_is_told_where_all_services_are(suite: Suite, http: Service) -> None:
    expected = {
        ("gateway", "gateway"): [suite.gateway.metrics],
        ("worker", "w1"): [suite.worker.metrics],
        ("loras", "loras"): [suite.store.metrics],
        ("http", "http"): [http.metrics],
    }

    def targets() -> dict[tuple[str, ...], list[str]]:
        with urllib.request.urlopen(f"http://{suite.gateway.metrics}{TARGETS_PATH}", timeout=10) as answer:
            return {tuple(group["labels"].values()): group["targets"] for group in json.loads(answer.read())}

    wait_until(lambda: targets() == expected, "all services to be listed")
