"""A LoRA store that was started without its catalogue, end to end: `bottega loras rebuild` brings all of it back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bottega.client import Client
from tests.e2e.conftest import has_store, store_config
from tests.support.running_loras import lora_file
from tests.support.services import Service, Services, gateway_config
from tests.support.waiting import wait_until

_COMMAND_S = 60.0


def _bottega(gateway: Service, *said: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    where = ("--address", gateway.address, "--fleet-address", gateway.fleet)
    return subprocess.run(
        [sys.executable, "-m", "bottega.client.cli", *said, *where],
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )


def test_loras_whose_catalogue_is_gone_are_brought_back_by_a_command(tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    with Services(tmp_path) as services:
        gateway = services.start("bottega.gateway", gateway_config(), name="gateway")
        settings = store_config(gateway.fleet, folder=str(folder))
        store = services.start("bottega.loras", settings, name="store")
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=_COMMAND_S) as client:
            wait_until(lambda: has_store(client), "the store to join")
            for seed, name in enumerate(("ink", "wash")):
                client.add_lora(name, lora_file(tmp_path, seed=seed), trigger_words=[f"in {name}"])
            client.pin_lora("ink")
            before = {lora.name: (lora.digest, lora.pinned, list(lora.trigger_words)) for lora in client.loras()}
            store.stop()
            for path in folder.glob("catalogue.db*"):
                path.rename(tmp_path / f"moved-{path.name}")
            store = services.start("bottega.loras", settings, name="store")
            wait_until(lambda: has_store(client), "the store to join again")
            warned = [event for event in store.events() if "were put into quarantine" in str(event.get("event"))]
            assert [(event["level"], event["folder"]) for event in warned] == [("WARNING", str(folder / "quarantine"))]
            assert client.loras() == ()
            rebuilt = _bottega(gateway, "loras", "rebuild")
            assert (rebuilt.returncode, rebuilt.stdout.splitlines()[-1]) == (0, "2 of 2 are back"), rebuilt.stderr
            after = {lora.name: (lora.digest, lora.pinned, list(lora.trigger_words)) for lora in client.loras()}
            assert after == before
            listed = _bottega(gateway, "loras", "quarantine")
            assert (listed.returncode, listed.stderr) == (0, "Nothing is in quarantine.\n")
