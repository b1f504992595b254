"""What stands in deploy/ for Prometheus and Grafana: made of what is there, taken by Prometheus, its alerts tested."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bottega.gateway.api.fleet_service import TARGETS_PATH
from bottega.gateway.config import DEFAULT_METRICS_ADDRESS
from tests.support.deployed_metrics import DEPLOY, PROMETHEUS, expressions, rules
from tests.unit.house.conftest import RunScript

RULES = ["bottega.rules.yml", "bottega.alerts.yml"]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool here (Debian: apt install prometheus)"
)


def promtool(*arguments: str) -> str:
    """What it says; fails where it is not content."""
    command = ["promtool", *arguments]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def alert_cases() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((PROMETHEUS / "bottega.tests.yml").read_text(encoding="utf-8"))
    return read


def test_the_dashboard_is_what_its_panels_make(tmp_path: Path, run_script: RunScript) -> None:
    made = tmp_path / "made.json"
    run_script("dashboard.py", made)
    there = DEPLOY / "grafana" / "dashboards" / "bottega.json"
    assert made.read_text() == there.read_text(), "python deploy/dashboard.py writes it anew"


def test_prometheus_asks_the_gateway_where_it_is_by_default() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert [each["url"] for each in job["http_sd_configs"]] == [f"http://{DEFAULT_METRICS_ADDRESS}{TARGETS_PATH}"]


def test_what_is_computed_beforehand_is_used_and_there() -> None:
    recorded = {rule["record"] for rule in rules("bottega.rules.yml")}
    used = {name for expression in expressions() for name in re.findall(r"\bbottega:[a-z0-9_:]+", expression)}
    assert used <= recorded, "nobody computes it"


def test_each_alert_says_what_it_means_and_is_seen_to_come_and_not_to_come() -> None:
    cases = [case for test in alert_cases()["tests"] for case in test.get("alert_rule_test", [])]
    comes = {case["alertname"] for case in cases if case.get("exp_alerts")}
    alerts = rules("bottega.alerts.yml")
    assert comes == {alert["alert"] for alert in alerts}
    for alert in alerts:
        said: Any = alert["annotations"]
        assert set(said) == {"summary", "description"}, alert["alert"]


@needs_promtool
def test_prometheus_takes_configuration_and_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", *RULES)


@needs_promtool
def test_alerts_come_when_they_shall_and_not_else() -> None:
    promtool("test", "rules", "bottega.tests.yml")
