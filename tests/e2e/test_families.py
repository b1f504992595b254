"""Models of other families draw through the whole suite what stock Diffusers draws from the same folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from bottega.client import Client
from bottega.errors import InvalidRequest
from tests.samples.edits import box_mask, template
from tests.samples.family_models import SIZE, FamilyStock, family_model
from tests.support.services import SMALL_ENGINE, Services, gateway_config, worker_config
from tests.support.stock import Pixels, assert_same_image, pixels_of
from tests.support.waiting import wait_until

# Version 2 with velocity prediction, and version 1 with a network that reads the mask.
MODELS = {"sd2": "SD 2", "sd1-inpainting": "SD 1 inpainting"}
PROMPT = "a big red star on the left"
STEPS = 4


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a suite of its own, with a worker of each model."""
    with Services(tmp_path_factory.mktemp("families")) as services, ThreadPoolExecutor(1) as pool:
        gateway = services.start("gateway", gateway_config())
        starts = []
        for name, family in MODELS.items():
            engine = {**SMALL_ENGINE, "model": str(family_model(family)), "model_name": name}
            starts.append(pool.submit(services.start, "worker", worker_config(gateway.fleet, name=name, engine=engine)))
        for start in starts:
            start.result()
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as connected:
            wait_until(lambda: {model.name for model in connected.models()} >= MODELS.keys(), "the workers to join")
            yield connected


def test_a_picture_with_all_defaults_is_that_of_the_folders_own_pipeline(client: Client) -> None:
    picture = client.generate(PROMPT, model="sd2", seed=7, num_inference_steps=STEPS)

    assert_same_image(pixels_of(picture.pil()), _stock("sd2", num_inference_steps=STEPS))
    assert picture.provenance.exact


def test_an_edit_with_a_network_that_reads_the_mask_is_that_of_stock(client: Client) -> None:
    image, mask = template(SIZE, SIZE), box_mask((4, 8, 20, 28), SIZE, SIZE)
    said: dict[str, Any] = {"num_inference_steps": STEPS, "strength": 0.6}
    picture = client.edit(image, mask, PROMPT, model="sd1-inpainting", seed=7, keep_unmasked=False, **said)

    assert_same_image(pixels_of(picture.pil()), _stock("sd1-inpainting", image=image, mask_image=mask, **said))


@pytest.mark.parametrize(
    ("model", "said", "sentence"),
    [
        ("sd2", {"prompt_2": "a heart"}, "prompt_2: must be empty: this model has one text encoder"),
        ("sd1-inpainting", {}, "mask_image: must be set: this is an inpainting model, which only edits pictures"),
    ],
)
def test_what_a_family_cannot_do_is_refused(client: Client, model: str, said: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        client.generate(PROMPT, model=model, seed=7, **said)


def _stock(model: str, **said: Any) -> Pixels:
    size = {"width": SIZE, "height": SIZE} if "mask_image" in said else {}
    generator = torch.Generator("cpu").manual_seed(7)
    return pixels_of(FamilyStock(MODELS[model]).text(PROMPT, generator=generator, **size, **said).images[0])
