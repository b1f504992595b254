"""The suite for benches of edits: a gateway and a worker as processes of their own, and a template that was edited."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import PIL.Image

from bottega.client import AsyncClient, Client
from load.bench.accelerations import ACCELERATIONS, say_of_workers
from load.bench.closed_loop import closed_loop
from load.bench.edit_model import SIZE, placed_mask
from load.bench.edit_steps import GUIDANCE_SCALE, PROMPT, STRENGTH, template
from tests.support.services import Services, gateway_config, worker_config
from tests.support.waiting import wait_until

_ACTIVATIONS_MIB = 4096
# With what it tries before.
_JOIN_S = 240.0
TIMEOUT_S = 600.0


class EditSuite:
    """Draws edits of the one template through the gateway. steps: of each."""

    def __init__(self, client: AsyncClient, steps: int) -> None:
        self._client = client
        self._steps = steps
        self._image = _png(template())

    async def edit(self, share: float, seed: int) -> float:
        """One, whose mask has this share of the tokens; the seconds from the call to the picture."""
        mask = _png(PIL.Image.fromarray(placed_mask(share, random.Random(seed))))
        began_s = time.perf_counter()
        picture = await self._client.edit(
            self._image,
            mask,
            PROMPT,
            seed=seed,
            num_inference_steps=self._steps,
            guidance_scale=GUIDANCE_SCALE,
            strength=STRENGTH,
            width=SIZE,
            height=SIZE,
            fidelity="fast",
        )
        seconds = time.perf_counter() - began_s
        made = picture.provenance
        if not (made.mask.recorded or made.blocks_reused):
            raise RuntimeError(f"an edit computed all of itself: {made.mask.computed_all_because}")
        return seconds

    async def record(self) -> None:
        """The template: the second edit completes what the first one did not record."""
        await self.alone([0.0, 0.0])

    async def alone(self, shares: Sequence[float]) -> list[float]:
        """One after the other."""
        return [await self.edit(share, seed) for seed, share in enumerate(shares)]

    async def per_s(self, shares: Sequence[float], clients: int) -> float:
        """Edits per second of so many clients that each wait for their last one."""

        async def draw(number: int) -> None:
            await self.edit(shares[number], number)

        return await closed_loop(draw, requests=len(shares), clients=clients)


@contextmanager
def running(model: Path, folder: Path, *, threads: int, sparse: bool) -> Iterator[str]:
    """The address of a gateway whose worker has joined. sparse: whether it convolves around masks alone."""
    folder.mkdir(parents=True)
    engine = {
        "model": str(model),
        "model_name": "bench",
        "threads": threads,
        "exclusive_cores": True,
        "accelerations": list(ACCELERATIONS),
        "edits": {"sparse_convolutions": sparse, "activations_mib": _ACTIVATIONS_MIB},
    }
    with Services(folder) as services:
        gateway = services.start("gateway", gateway_config())
        services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))
        with Client(gateway.address, fleet_address=gateway.fleet) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=_JOIN_S)
            say_of_workers(client)
        yield gateway.address


def _png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
