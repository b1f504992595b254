"""`bottega loras profile` and the SDK's part in it, against a real gateway and store with scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega import errors
from bottega.client import AsyncClient
from bottega.v1 import generation_pb2
from bottega.v1 import lora_pb2 as pb
from bottega.v1.generation_pb2 import Lora
from tests.support.gateway_with_loras import House, lora_house
from tests.support.terminal import run_at

PROFILE = ("loras", "profile")
PROMPTS = ("a star", "a ring", "a square", "a circle")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with lora_house(tmp_path) as made:
        yield made


async def _bounds(house: House) -> list[tuple[int, int]]:
    lora = (await house.store.stub.GetLora(pb.GetLoraRequest(name="ink"), timeout=5)).lora
    return [(bound.num_inference_steps, bound.max_step) for bound in lora.bounds]


async def test_it_draws_every_prompt_with_two_seeds_and_the_store_remembers_the_worst(house: House) -> None:
    worker = await house.gateway.worker()
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result = await run_at(house.gateway, *PROFILE, "ink", *prompts, "--steps", 20, "--steps", 10, "--scale", 0.5)
    assert result.exit_code == 0, result.output
    assert result.stdout == "ink may be late until step 2 of 20\nink may be late until step 2 of 10\n"
    assert [(each.spec.prompt, each.spec.num_inference_steps) for each in worker.requests] == [
        (prompt, steps) for steps in (20, 10) for prompt in PROMPTS
    ]
    assert {(each.spec.num_images, each.spec.loras[0].scale) for each in worker.requests} == {(2, 0.5)}
    assert len({each.spec.seed for each in worker.requests}) == 4
    assert all(each.spec.loras[0].measure_similarity for each in worker.requests)
    assert await _bounds(house) == [(10, 2), (20, 2)]
    shown = await run_at(house.gateway, "loras", "show", "ink")
    assert "step 2 of 10, step 2 of 20" in shown.stdout


async def test_the_worst_picture_counts_and_admission_goes_by_it(house: House) -> None:
    worker = await house.gateway.worker()
    courses = iter([(1.0,) * 9, (1.0,) * 7 + (0.5, 0.5), (1.0,) * 9, (1.0,) * 9])

    def next_course(step: int) -> None:
        steps.append(step)
        worker.script.similarities = next(courses, ())

    steps: list[int] = []
    worker.script.similarities = next(courses)
    async with AsyncClient(house.gateway.address, fleet_address=house.gateway.fleet_address) as client:
        measured = await client.profile_lora("ink", PROMPTS, num_inference_steps=9, on_prompt=next_course)
    assert (measured.max_step, measured.prompts, steps) == (7, (9, 7, 9, 9), [9, 7, 9, 9])
    assert measured.digest == house.ink.digest
    fidelity = generation_pb2.FIDELITY_BALANCED
    await house.gateway.draw(loras=[Lora(name="ink")], num_inference_steps=18, fidelity=fidelity)
    assert worker.requests[-1].spec.loras[0].max_step == 14
    assert not worker.requests[-1].spec.loras[0].measure_similarity


async def test_what_cannot_be_measured_is_said_and_nothing_noted(house: House) -> None:
    worker = await house.gateway.worker()
    result = await run_at(house.gateway, *PROFILE, "ink", "--prompt", "a star")
    assert result.exit_code != 0
    assert "at least 4 different ones" in result.stderr
    worker.script.similarities = ()
    result = await run_at(house.gateway, *PROFILE, "ink")
    assert "did not compare latents with and without the LoRA ink" in result.stderr
    async with AsyncClient(house.gateway.address, fleet_address=house.gateway.fleet_address) as client:
        with pytest.raises(errors.LoraNotFound):
            await client.profile_lora("nobody", PROMPTS)
    assert await _bounds(house) == []
