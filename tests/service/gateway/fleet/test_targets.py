"""A Prometheus finds the metrics of all services at the gateway's own."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

from bottega.gateway.api.fleet_service import TARGETS_PATH
from tests.support.deployed_metrics import scrape
from tests.support.running_cache import joined_cache
from tests.support.running_gateway import Running
from tests.support.waiting import eventually


def _targets(gateway: Running) -> dict[str, str]:
    """host:port of metrics, by the name of the service."""
    with urllib.request.urlopen(f"http://{gateway.gateway.server.metrics_address}{TARGETS_PATH}", timeout=10) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        groups = json.loads(answer.read())
    return {group["labels"]["instance"]: group["targets"][0] for group in groups}


async def test_services_are_found_while_they_are_there(house: Running, tmp_path: Path) -> None:
    assert list(await asyncio.to_thread(_targets, house)) == ["gateway"]
    async with joined_cache(house, tmp_path, name="studies"):
        found = await asyncio.to_thread(_targets, house)
        assert list(found) == ["gateway", "studies"]
        assert "bottega_members" in await asyncio.to_thread(scrape, found["gateway"])
        assert "bottega_cache_lookups_total" in await asyncio.to_thread(scrape, found["studies"])

    async def gone() -> bool:
        return list(await asyncio.to_thread(_targets, house)) == ["gateway"]

    await eventually(gone, "the cache to be gone")
