"""What deploy/ names of the services' metrics, and whether a scrape has it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"

_NAME = re.compile(r"\b(?:bottega|process|python)_[a-z0-9_]+")
# By the beginning of their names; what begins otherwise is the gateway's, or everybody's.
_OWNERS = {
    "bottega_worker_": ("worker",),
    "bottega_device_": ("worker", "controlnet"),
    "bottega_link_": ("worker", "controlnet"),
    "bottega_controlnet_": ("controlnet",),
    "bottega_lora_": ("loras",),
    "bottega_cache_": ("cache",),
    "bottega_activations_": ("activations",),
    "bottega_http_": ("http",),
    "bottega_certificate_": (),  # only with TLS
}
# Whatever is added to these must be of few values, none of which says who asked for what.
_LABELS = frozenset(
    (
        "acceleration",
        "cause",
        "code",
        "controlnet",
        "direction",
        "event",
        "holder",
        "kind",
        "latent",
        "le",
        "limit",
        "model",
        "method",
        "outcome",
        "reason",
        "route",
        "rows",
        "stage",
        "state",
        "status",
        "template",
        "tier",
        "work",
    )
)
_INFO = "python_info"


def rules(name: str) -> list[dict[str, str]]:
    """Those of a file of deploy/prometheus."""
    groups = yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    """PromQL of the dashboard, of the alerts, and of the rules that both use."""
    for section in yaml.safe_load((DEPLOY / "grafana" / "panels.yml").read_text(encoding="utf-8")):
        for panel in section["panels"]:
            yield from panel["queries"].values()
    for name in ("bottega.rules.yml", "bottega.alerts.yml"):
        yield from (rule["expr"] for rule in rules(name))


def named_of(kind: str) -> set[str]:
    """Samples that they name and that services of this kind have."""
    names = {name for expression in expressions() for name in _NAME.findall(expression)}
    return {name for name in names if kind in _owners(name)}


def scrape(address: str) -> str:
    """What a service shows at host:port."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def assert_shows_what_is_named(kind: str, scraped: str) -> None:
    """A scrape of a service of this kind has all that deploy/ names of it, and no label that nobody knows."""
    samples: set[str] = set()
    labels: set[str] = set()
    for family in text_string_to_metric_families(scraped):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        samples |= {f"{family.name}{end}" for end in ends}
        labels |= {label for sample in family.samples if family.name != _INFO for label in sample.labels}
    named = named_of(kind)
    assert named, f"deploy/ names nothing of {kind}"
    assert named <= samples, f"no such metrics of {kind}: {sorted(named - samples)}"
    assert labels <= _LABELS, f"new labels of {kind}: {sorted(labels - _LABELS)}"


def _owners(name: str) -> tuple[str, ...]:
    return next((kinds for beginning, kinds in _OWNERS.items() if name.startswith(beginning)), ("gateway",))
