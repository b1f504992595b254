"""The real gateway with a real LoRA store in its fleet, and workers that do what the test says."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from bottega import errors, kinds
from bottega.addons.loras.gateway.addon import LoraAddOn
from bottega.addons.loras.gateway.resolver import GrpcLoraClient
from bottega.gateway.api import image_service
from bottega.rpc.channel import PLAINTEXT, Target
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1 import lora_pb2 as pb
from bottega.v1.generation_pb2 import Lora
from tests.fakes.scripted_worker import MODEL
from tests.support import running_loras
from tests.support.addon_messages import loras_at
from tests.support.gateway_with_loras import House, lora_house, lora_store
from tests.support.running_gateway import refusal, running_gateway
from tests.support.running_loras import PATIENCE_S
from tests.support.waiting import eventually

SERVICE = pb.DESCRIPTOR.services_by_name["LoraService"].full_name


def _model(name: str) -> image_pb2.Model:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.name = name
    return model


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with lora_house(tmp_path) as made:
        yield made


async def test_a_request_that_names_a_lora_and_no_model_goes_to_its_base(house: House) -> None:
    miniature = await house.gateway.worker("m", model=_model("miniature"))
    other = await house.gateway.worker("o", model=_model("other"))
    await house.gateway.draw(prompt="a star", loras=[Lora(name="wash", scale=0.5)])
    await house.gateway.draw(prompt="a star", loras=[Lora(name="ink")])
    (to_other,), (to_miniature,) = other.requests, miniature.requests
    assert (to_other.spec.model, to_miniature.spec.model) == ("other", "miniature")
    (lora,) = to_other.spec.loras
    assert (lora.name, lora.scale, lora.digest) == ("wash", 0.5, house.wash.digest)
    (lora,) = to_miniature.spec.loras
    assert (lora.scale, lora.digest) == (1.0, house.ink.digest)


async def test_callers_that_list_at_a_silent_store_wait_for_one_answer_together(house: House) -> None:
    asked = 0

    async def silence(request: pb.ListLorasRequest, context: object) -> pb.ListLorasResponse:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        silence, pb.ListLorasRequest.FromString, pb.ListLorasResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ListLoras": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    member = house.gateway.gateway._controller._fleet.join(
        fleet_pb2.Registration(kind=kinds.LORAS, name="a", address=f"127.0.0.1:{port}", instance="x" * 32)
    )
    try:
        ask = functools.partial(house.gateway.images.ListAdapters, image_pb2.ListAdaptersRequest(), timeout=20)
        await asyncio.gather(*(refusal(ask, errors.NoLora) for _ in range(5)))
        assert asked == 1
    finally:
        member.connected = False
        await server.stop(None)


async def test_the_pages_of_one_caller_are_made_from_one_list(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    adapters = LoraAddOn.adapters

    async def counted(*args: Any) -> Sequence[image_pb2.Adapter]:
        nonlocal made
        made += 1
        return await adapters(*args)

    monkeypatch.setattr(LoraAddOn, "adapters", counted)
    monkeypatch.setattr(image_service, "_LISTED_S", 600.0)
    names: list[str] = []
    token = ""
    while token or not names:
        request = image_pb2.ListAdaptersRequest(page_size=1, page_token=token)
        page = await house.gateway.images.ListAdapters(request, timeout=20)
        names += [adapter.name for adapter in page.adapters]
        token = page.next_page_token
    assert (names, made) == (["ink", "wash"], 1)


async def test_a_lora_for_another_base_is_refused_and_both_are_named(house: House) -> None:
    await house.gateway.worker("m", model=_model("miniature"))
    await house.gateway.worker("o", model=_model("other"))
    for spec in (
        {"model": "miniature", "loras": [Lora(name="wash")]},
        {"loras": [Lora(name="ink"), Lora(name="wash")]},
    ):
        error = await refusal(functools.partial(house.gateway.generate, **spec), errors.LoraUnusable)
        assert "other" in error.message
        assert "miniature" in error.message
        assert error.metadata == {"lora": "wash", "made_for": "other", "model": "miniature"}


async def test_a_lora_whose_base_nobody_serves_is_named_with_it(house: House) -> None:
    await house.gateway.worker()
    error = await refusal(lambda: house.gateway.generate(loras=[Lora(name="wash")]), errors.ModelNotFound)
    assert error.message == "wash was made for the base model other, which no worker serves; served: miniature"
    assert error.metadata == {"served": "miniature"}


async def test_a_lora_that_no_store_has_is_not_found_and_without_a_store_nothing_is_known(
    house: House, tmp_path: Path
) -> None:
    await house.gateway.worker()
    unknown = [Lora(name="ink"), Lora(name="no/such"), Lora(name="nor/this")]
    error = await refusal(lambda: house.gateway.generate(loras=unknown), errors.LoraNotFound)
    assert error.metadata["loras"] == "no/such,nor/this"
    async with running_gateway() as alone:
        await alone.worker()
        await refusal(lambda: alone.generate(loras=[Lora(name="ink")]), errors.NoLora)


async def test_other_weights_than_those_that_were_pinned_are_refused(house: House) -> None:
    worker = await house.gateway.worker()
    await house.gateway.draw(loras=[Lora(name="ink", digest=house.ink.digest)])
    assert len(worker.requests) == 1
    await refusal(lambda: house.gateway.generate(loras=[Lora(name="ink", digest="0" * 64)]), errors.LoraUnusable)


async def test_what_a_job_waits_for_is_prefetched_and_leased(house: House) -> None:
    await house.gateway.worker()
    await house.gateway.draw(loras=[Lora(name="ink")])
    ink = await house.store.store.catalogue.get("ink")
    await eventually(lambda: house.store.store.state(ink) is True)
    error = await running_loras.refused(house.store.stub.DeleteLora(pb.DeleteLoraRequest(name="ink"), timeout=60))
    assert isinstance(error, errors.LoraInUse)


async def test_a_lora_is_not_removed_as_long_as_a_job_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.addons.loras.gateway.resolver._PROTECT_S", 0.1)
    async with lora_house(tmp_path, lease_s=3.0) as house:
        worker = await house.gateway.worker()
        worker.script.hold_at = 10
        job = await house.gateway.submit(loras=[Lora(name="ink")])
        await worker.arrived.wait()
        await asyncio.sleep(3.5)
        error = await running_loras.refused(house.store.stub.DeleteLora(pb.DeleteLoraRequest(name="ink"), timeout=60))
        assert isinstance(error, errors.LoraInUse)
        await house.gateway.images.CancelJob(image_pb2.CancelJobRequest(job_id=job.job_id), timeout=60)

        async def is_removed() -> bool:
            try:
                await house.store.stub.DeleteLora(pb.DeleteLoraRequest(name="ink"), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(is_removed)


async def test_workers_are_told_where_stores_are_as_soon_as_that_changes(house: House, tmp_path: Path) -> None:
    worker = await house.gateway.worker()
    first = ("loras", house.store.server.address)
    async with lora_store(house.gateway, tmp_path / "annex", name="annex") as annex:
        await eventually(lambda: worker.lora_stores == [("annex", annex.server.address), first])
    await eventually(lambda: worker.lora_stores == [first])


async def test_the_step_is_kept_though_the_gateway_and_its_workers_die_together(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    async with lora_house(tmp_path, state=state) as house:
        first = await house.gateway.worker("w1")
        first.script.loras_step, first.script.hold_at = 4, 10
        job = await house.gateway.submit(loras=[Lora(name="ink")])
        await first.arrived.wait()
        await eventually(lambda: _has_made(house, job, steps=10))
    async with running_gateway(state=state, hold_s=0.2) as later:
        second = await later.worker("w2")
        assert (await later.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert second.requests[0].decisions.by_kind == loras_at(4)
    assert not second.requests[0].checkpoint


async def _has_made(house: House, job: image_pb2.Job, *, steps: int) -> bool:
    return (await house.gateway.job(job.job_id)).steps_done >= steps


async def test_who_asks_a_store_that_is_gone_hears_so_and_is_not_cut_off() -> None:
    """Its client is closed as soon as another store is asked."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target(address=f"127.0.0.1:{silent.getsockname()[1]}", role="loras")
        client = GrpcLoraClient(target, PLAINTEXT)
        asked = asyncio.create_task(client.get("ink", deadline_s=0.5))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(client.close(grace_s=PATIENCE_S))
        with pytest.raises(errors.NoLora, match="did not respond"):
            await asked
        await asyncio.wait_for(closing, PATIENCE_S)
