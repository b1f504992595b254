"""A picture that was drawn to be edited: its latents outlive the worker, and its first edit needs no second pass.

On services of its own: those of the other tests pad their rows, which masked blocks do not.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from bottega.client import Box, Client
from bottega.client.types.picture import Picture
from tests.support.services import Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

_ENGINE = {"model": "miniature", "threads": 1}
_DRAWN: dict[str, Any] = {"num_inference_steps": 6, "guidance_scale": 4.0, "width": 64, "height": 64}
_BOX = Box(0, 0, 20, 20)
# So far from the mask that a decoder makes next to nothing of it there.
_FAR = (slice(48, None), slice(48, None))


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with Services(tmp_path_factory.mktemp("kept")) as services:
        yield services


@pytest.fixture(scope="module")
def gateway(services: Services) -> Service:
    return services.start("gateway", gateway_config())


def _worker(services: Services, gateway: Service) -> Service:
    return services.start("worker", worker_config(gateway.fleet, name="w1", engine=_ENGINE))


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    with PIL.Image.open(io.BytesIO(picture.data)) as image:
        return np.asarray(image.convert("RGB"))


def _changed(edited: Picture, picture: Picture) -> float:
    """How much of the picture was changed far from the mask, in levels of 255, on average."""
    after, before = _pixels(edited)[_FAR].astype(float), _pixels(picture)[_FAR].astype(float)
    return float(np.abs(after - before).mean())


def _edited(client: Client, picture: Picture, **said: Any) -> Picture:
    """As Diffusers leaves it, so that what the autoencoder does to it is seen."""
    options = {**_DRAWN, "seed": 5, "keep_unmasked": False, "identical_results": False, **said}
    return client.edit(picture, _BOX, "a big green star on a blue background", **options)


def test_the_first_edit_reuses_blocks_and_after_the_worker_is_gone_the_latents_are_still_there(
    services: Services, gateway: Service
) -> None:
    worker = _worker(services, gateway)
    with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as client:
        wait_until(lambda: bool(client.models()), "the worker to join")
        picture = client.generate("a big red star on a blue background", seed=3, keep_for_editing=True, **_DRAWN)
        exact = _edited(client, picture)
        assert exact.provenance.exact
        encoded = _changed(exact, picture)

        first = _edited(client, picture, masked_blocks=True)
        mask = first.provenance.mask
        assert mask is not None
        assert (mask.recording != "", first.provenance.blocks_reused > 0, first.provenance.exact) == (True, True, False)
        assert _changed(first, picture) < encoded / 2, "nothing was encoded again"

        worker.kill()
        _worker(services, gateway)
        wait_until(lambda: any(model.workers for model in client.models()), "the worker to be back")
        again = _edited(client, picture, masked_blocks=True)
        assert again.provenance.blocks_reused == 0, "what was recorded has gone with the worker"
        assert _changed(again, picture) < encoded / 2, "the latents have not"
