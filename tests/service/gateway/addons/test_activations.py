"""The real gateway with a real activation store in its fleet, and workers that do what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bottega import kinds
from bottega.v1 import generation_pb2, image_pb2, worker_pb2
from bottega.v1.activations_pb2 import ActivationsOrder
from bottega.v1.fleet_pb2 import MaskTokens
from tests.samples.hostile_images import saved
from tests.support.running_activations import LARGE, Recorded, Running, joined_store
from tests.support.running_gateway import Running as RunningGateway
from tests.support.running_gateway import running_gateway
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually

BALANCED = generation_pb2.FIDELITY_BALANCED
PICTURE = saved(Image.new("RGB", (96, 80), "red"))


def _mask(side: int = 16) -> bytes:
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, side, side))
    return saved(mask)


def _edit(**said: Any) -> dict[str, Any]:
    return {"prompt": "a star", "image": PICTURE, "mask_image": _mask(), "fidelity": BALANCED, **said}


def _source(request: worker_pb2.RunAttemptRequest) -> str:
    return ActivationsOrder.FromString(request.addons[kinds.ACTIVATIONS]).source


@pytest.fixture
async def house() -> AsyncIterator[RunningGateway]:
    async with running_gateway(codec_processes=1) as running:
        yield running


async def test_edits_of_one_image_at_one_size_are_of_one_template(house: RunningGateway) -> None:
    worker = await house.worker()
    other = saved(Image.new("RGB", (96, 80), "blue"))
    same = [_edit(), _edit(mask_image=_mask(32), prompt="a dog", seed=3, techniques=_masked())]
    others = [_edit(image=other), _edit(width=128), _edit(padding_mask_crop=4), _edit(padding_mask_crop=40)]
    for said in (*same, *others):
        await house.draw(**said)
    sources = [_source(request) for request in worker.requests]
    assert sources[0] == sources[1]
    assert len(set(sources)) == 1 + len(others)
    assert all(len(source) == 64 for source in sources)


async def test_workers_are_told_whose_pictures_they_record_for_edits_to_come(tmp_path: Path) -> None:
    """Else the tenant's edits, which look among its own recordings, would never find them."""
    file = tmp_path / "tenants.json"
    key = add_tenant(file, "shop")
    async with running_gateway(tenants=str(file), codec_processes=1) as house, calling(house, key) as shop:
        worker = await house.worker()
        worker.script.picture = lambda index: PICTURE
        size: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 4}
        drawn = await shop.draw(prompt="a star", keep_for_editing=True, **size)
        await shop.draw(**_edit(image=drawn.images[0].data, **size))
    kept, edit = (ActivationsOrder.FromString(each.addons[kinds.ACTIVATIONS]) for each in worker.requests)
    assert (kept.tenant, kept.source) == ("shop", "")
    assert edit.tenant == "shop"
    assert len(edit.source) == 64


async def test_an_edit_counts_by_its_mask_through_a_restart(tmp_path: Path) -> None:
    async with running_gateway(codec_processes=1, state=str(tmp_path)) as house:
        worker = await house.worker(hold_at=1)
        worker.mask_tokens = MaskTokens(token_elements=2, margin_tokens=1)
        assert worker.membership is not None
        worker.membership.report_soon()
        fleet = house.gateway._controller._fleet
        await eventually(lambda: fleet.mask_tokens("miniature") is not None or fleet.mask_tokens("m") is not None)
        job = await house.submit(**_edit())
        kept = house.gateway._jobs.find_live(job.job_id)
        assert kept is not None
        # 16 pixels are 4 elements of the latent, 2 tokens a side of 8; with the margin 3 of them.
        assert kept.request.computed_share == pytest.approx(9 / 64)
        template = kept.request.edit_source
        await house.stop_early()
    async with running_gateway(codec_processes=1, state=str(tmp_path), hold_s=0.1) as house:
        kept = house.gateway._jobs.find_live(job.job_id)
        assert kept is not None
        assert kept.request.edit_source == template
        assert kept.request.computed_share == pytest.approx(9 / 64)
        await house.worker("w2")
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_template_comes_from_the_disk_while_its_edit_waits(house: RunningGateway, tmp_path: Path) -> None:
    worker = await house.worker()
    await house.draw(**_edit())
    template = Recorded(source=_source(worker.requests[-1]), layout=LARGE)
    async with joined_store(house, tmp_path) as store:
        await store.fill(template, Recorded(seed=1, layout=LARGE))
    async with joined_store(house, tmp_path, name="again") as store:
        assert await _memory_bytes(store) == 0
        worker.script.hold_at = 1
        running = await house.submit(**_edit(mask_image=None))
        waiting = await house.submit(**_edit(seed=2, techniques=_masked()))
        await eventually(lambda: _is_in_memory(store, template))
        assert not await _is_in_memory(store, Recorded(seed=1)), "nobody waits for that"
        assert (await house.job(waiting.job_id)).state in {image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING}
        worker.script.release.set()
        for job in (running, waiting):
            assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_store_that_is_gone_holds_up_no_edit(house: RunningGateway, tmp_path: Path) -> None:
    worker = await house.worker()
    async with joined_store(house, tmp_path):
        await house.draw(**_edit())
    await house.draw(**_edit(seed=1, techniques=_masked()))
    assert len(worker.requests) == 2


def _masked(on: bool = True) -> generation_pb2.Techniques:
    return generation_pb2.Techniques(masked_blocks=on)


async def _memory_bytes(store: Running) -> int:
    return int((await store.call("ListStoredTemplates")).memory_bytes)


async def _is_in_memory(store: Running, template: Recorded) -> bool:
    return any(found.id == template.id and found.memory_bytes for found in await store.templates())
