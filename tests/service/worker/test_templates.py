"""What a real worker records of edits' images, what it says of that to operators, and what it keeps of pictures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio

from bottega.v1 import generation_pb2, worker_pb2
from bottega.v1.activations_pb2 import (
    DropTemplateRequest,
    ListTemplatesRequest,
    ListTemplatesResponse,
    ProfileBlocksRequest,
)
from bottega.worker.config import EngineConfig
from bottega.worker.engine_client import ENGINE_MODULE
from tests.samples.edits import box_mask, template
from tests.samples.hostile_images import saved
from tests.support.running_front import CONFIG, Running, running_workers
from tests.support.waiting import eventually

# One worker for all tests here: it needs some seconds to load its model.
pytestmark = pytest.mark.asyncio(loop_scope="module")

_REAL = replace(CONFIG, engine=EngineConfig(threads=1), hang_s=30.0, stall_s=60.0, start_stall_s=90.0)
_IMAGE, _MASK = saved(template()), saved(box_mask((8, 8, 40, 40)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_workers() as start:
        yield await start(_REAL, module=ENGINE_MODULE)


def order(job_id: str, **fields: object) -> worker_pb2.RunAttemptRequest:
    """All that the gateway fills in."""
    spec = generation_pb2.GenerationSpec(
        prompt="a big red star", num_inference_steps=5, guidance_scale=4.0, width=64, height=64, seed=7, num_images=1
    )
    spec.MergeFrom(generation_pb2.GenerationSpec(**fields))  # type: ignore[arg-type]
    return worker_pb2.RunAttemptRequest(attempt=worker_pb2.AttemptId(job_id=job_id, number=1), spec=spec)


def edit(job_id: str, seed: int, **fields: object) -> worker_pb2.RunAttemptRequest:
    """An edit that takes masked blocks whatever the model's do."""
    said = {"image": _IMAGE, "mask_image": _MASK, "strength": 0.9999, "keep_unmasked": True, "mask_feather": 4}
    techniques = generation_pb2.Techniques(masked_blocks=True)
    return order(job_id, **{**said, "seed": seed, "techniques": techniques, **fields})


async def provenance(running: Running, request: worker_pb2.RunAttemptRequest) -> generation_pb2.Provenance:
    events = await running.events(request)
    assert events[-1].WhichOneof("event") == "completed", events[-1]
    return events[-1].completed.provenance


async def templates(running: Running) -> ListTemplatesResponse:
    return await running.templates.ListTemplates(ListTemplatesRequest(), timeout=10)


def metrics(running: Running) -> dict[tuple[str, str | None], float]:
    families = running.server.registry.collect()
    return {(one.name, one.labels.get("event")): one.value for family in families for one in family.samples}


async def test_a_template_is_recorded_used_listed_and_dropped(running: Running) -> None:
    assert not (await templates(running)).templates
    first, second = await provenance(running, edit("first", 1)), await provenance(running, edit("second", 2))
    assert first.mask.recorded
    assert first.mask.computed_all_because == "it is the first edit of this image"
    assert first.exact
    assert 0 < second.blocks_reused == second.blocks_total
    assert second.mask.share == pytest.approx(0.25)
    assert 0.25 < second.mask.computed_share < 1
    assert first.mask.dilated_share == second.mask.dilated_share == second.mask.computed_share
    assert not second.exact
    listed = await templates(running)
    (known,) = listed.templates
    assert (known.id, known.uses, known.steps) == (second.mask.recording, 1, 4)
    assert (known.model, known.width, known.height) == ("miniature", 64, 64)
    assert 0 < known.size_bytes == listed.used_bytes < listed.budget_bytes == 512 << 20
    assert (known.in_use, known.recording) == (False, False)
    events = ("bottega_worker_addon_events_total", "blocks_reused")
    await eventually(
        lambda: metrics(running).get(events) == second.blocks_reused
    )  # an idle engine beats twice a second
    samples = metrics(running)
    assert samples["bottega_worker_recordings", None] == 1
    assert samples["bottega_worker_activation_bytes", None] == known.size_bytes
    assert samples["bottega_worker_addon_events_total", "hits"] == 1
    dropped = await running.templates.DropTemplate(DropTemplateRequest(id=known.id[:8]), timeout=10)
    assert dropped.dropped == 1
    assert not (await templates(running)).templates


async def test_blocks_are_measured_on_request_and_refusals_say_why(running: Running) -> None:
    profile = (await running.templates.ProfileBlocks(ProfileBlocksRequest(), timeout=60)).profile
    assert (profile.width, profile.height) == (64, 64)
    assert len(profile.blocks) > 6
    assert profile.forward_s > 0
    for request, code in (
        (ProfileBlocksRequest(width=-1), grpc.StatusCode.INVALID_ARGUMENT),
        (ProfileBlocksRequest(width=63), grpc.StatusCode.INVALID_ARGUMENT),
        (ProfileBlocksRequest(width=16384, height=16384), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.templates.ProfileBlocks(request, timeout=60)
        assert refused.value.code() is code
