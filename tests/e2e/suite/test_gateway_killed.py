"""A gateway that is killed changes when pictures are ready, never what they show; nothing is drawn twice."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from bottega.client import Client, Picture
from tests.e2e.conftest import ENGINE
from tests.support.services import Services, gateway_config, worker_config
from tests.support.waiting import wait_until

PROMPTS = ("a big red star", "a small blue circle", "a green square", "a yellow triangle")
STEPS = 60
# Groups of always so many rows, so that pictures are equal byte for byte whoever runs beside them.
FIXED_ROWS = 4


def _draw_all(address: str) -> tuple[list[threading.Thread], dict[str, Picture]]:
    """Begins to draw every prompt, each with a client of its own."""
    pictures: dict[str, Picture] = {}

    def draw(prompt: str) -> None:
        with Client(address, timeout_s=60.0) as client:
            pictures[prompt] = client.generate(prompt, seed=5, num_inference_steps=STEPS, guidance_scale=4.0)

    threads = [threading.Thread(target=draw, args=(prompt,), daemon=True) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    return threads, pictures


def _steps_done(client: Client) -> list[int]:
    return [job.steps_done for job in client.list_jobs(page_size=len(PROMPTS)).jobs]


def test_four_pictures_are_the_same_when_their_gateway_is_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        fleet = f"127.0.0.1:{free.getsockname()[1]}"
    config = gateway_config(server={"listen": address, "metrics_listen": "127.0.0.1:0"}, fleet={"listen": fleet})
    engine = {**ENGINE, "fixed_rows": FIXED_ROWS}
    with Services(tmp_path) as services:
        gateway = services.start("bottega.gateway", config, name="gateway")
        services.start("bottega.worker", worker_config(fleet, name="w1", engine=engine))
        with Client(address) as client:
            wait_until(lambda: bool(client.models()), "the worker to join")
            threads, undisturbed = _draw_all(address)
            for thread in threads:
                thread.join(60)
            threads, pictures = _draw_all(address)
            wait_until(lambda: max(_steps_done(client)) in range(10, STEPS), "them to be drawn")
            gateway.kill()
            services.start("bottega.gateway", config, name="gateway")
            for thread in threads:
                thread.join(60)
        for prompt in PROMPTS:
            assert pictures[prompt].data == undisturbed[prompt].data
            assert (pictures[prompt].provenance.attempts, pictures[prompt].provenance.repeated_steps) == (1, 0)
