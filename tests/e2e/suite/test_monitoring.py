"""What a Prometheus sees of services as they really run: all that the dashboard and the alerts name."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from bottega.client import Client
from tests.e2e.conftest import Suite
from tests.support.deployed_metrics import assert_shows_what_is_named, scrape
from tests.support.services import Service

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool here (Debian: apt install prometheus)"
)


@pytest.fixture(scope="module")
def scraped(suite: Suite, http: Service, client: Client) -> dict[str, str]:
    """Of services that have been at work."""
    client.generate("a red star", num_inference_steps=2)
    services = {"gateway": suite.gateway, "worker": suite.worker, "loras": suite.store, "http": http}
    return {kind: scrape(service.metrics) for kind, service in services.items()}


def test_a_scrape_has_what_dashboard_and_alerts_name_and_says_nothing_of_users(scraped: dict[str, str]) -> None:
    for kind, text in scraped.items():
        assert_shows_what_is_named(kind, text)


@needs_promtool
def test_prometheus_own_check_finds_nothing_in_a_scrape(scraped: dict[str, str]) -> None:
    for text in scraped.values():
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
