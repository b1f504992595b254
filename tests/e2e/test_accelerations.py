"""What a worker has kept of its accelerations and why not the rest, where people look: fleet, picture, metrics."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from bottega.client import Client
from tests.support.services import SMALL_ENGINE, Services, gateway_config, worker_config
from tests.support.terminal import run
from tests.support.waiting import wait_until

_TRIED = ["faked.faster", "faked.slower", "faked.wrong"]


def test_a_running_fleet_says_what_its_workers_keep_and_why_not_the_rest(tmp_path: Path) -> None:
    with Services(tmp_path) as services:
        gateway = services.start("gateway", gateway_config())
        engine = {**SMALL_ENGINE, "accelerations": _TRIED}
        config = worker_config(gateway.fleet, name="w1", engine=engine)
        worker = services.start("tests.fakes.accelerated_worker", config, name="worker")
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as client:
            wait_until(lambda: bool(client.models()), "the worker to join")
            said = _rows(run("fleet", "-v", address=gateway.address, fleet=gateway.fleet).output)
            picture = client.generate("a red star", seed=1, num_inference_steps=2)
        scraped = urllib.request.urlopen(f"http://{worker.metrics}/metrics", timeout=5).read().decode()
    assert list(said) == _TRIED
    assert said["faked.faster"].startswith("yes")
    assert re.match(r"no .* times as fast here, and at least 1\.03 is required", said["faked.slower"])
    assert re.match(r"no .* its results differ by .* of the largest value, and 0\.01 is allowed", said["faked.wrong"])
    assert picture.provenance.accelerations == ("faked.faster",), "a picture says what it was computed by"
    kept = dict(re.findall(r'bottega_worker_acceleration_kept\{acceleration="([^"]+)"\} (\S+)', scraped))
    assert kept == {"faked.faster": "1.0", "faked.slower": "0.0", "faked.wrong": "0.0"}


def _rows(output: str) -> dict[str, str]:
    """What stands behind each acceleration in the worker's rows."""
    rows = (line.split(maxsplit=2) for line in output.splitlines() if " faked." in line)
    return {name: " ".join(rest.split()) for _worker, name, rest in rows}
