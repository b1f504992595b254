"""What tenants may name at a real gateway: models, LoRAs of a real store, and ControlNets. All else is as nothing."""

from __future__ import annotations

import asyncio
import functools
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bottega import errors
from bottega.errors import BottegaError
from bottega.rpc.security.caller import Grants
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import ControlNet, Lora
from tests.fakes.scripted_controlnet import hosted
from tests.fakes.scripted_worker import MODEL, ScriptedWorker
from tests.support.gateway_with_loras import House, lora_house
from tests.support.running_gateway import Running, refusal
from tests.support.running_loras import lora_file
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually


class Shops:
    """A gateway with a LoRA store, whose operator has brought a tenant's LoRAs, and three tenants.

    one: has `sketch`, and an `ink` of its own. other: has nothing. bound: has its own `wash` and was given `ink`, and
    the model `miniature`.
    """

    def __init__(self, house: House, one: Running, other: Running, bound: Running, file: Path) -> None:
        self.house, self.one, self.other, self.bound, self.file = house, one, other, bound, file


@pytest.fixture
async def shops(tmp_path: Path) -> AsyncIterator[Shops]:
    file = tmp_path / "tenants.json"
    given = Grants(models=("miniature",), loras=("ink",), controlnets=("edges",))
    keys = [add_tenant(file, name) for name in ("one", "other")] + [add_tenant(file, "bound", grants=given)]
    async with (
        lora_house(tmp_path, tenants=str(file), codec_processes=1) as house,
        calling(house.gateway, keys[0]) as one,
        calling(house.gateway, keys[1]) as other,
        calling(house.gateway, keys[2]) as bound,
    ):
        for seed, name in enumerate(("sketch@one", "ink@one", "wash@bound"), start=2):
            await house.store.upload(name, await asyncio.to_thread(lora_file, tmp_path, seed=seed))
        yield Shops(house, one, other, bound, file)


@pytest.fixture
async def worker(shops: Shops) -> ScriptedWorker:
    return await shops.house.gateway.worker()


async def _refused(shop: Running, spec: Callable[[str], dict[str, Any]], *names: str) -> set[str]:
    """All that is said where these are named, with the name left out."""
    said = set()
    for name in names:
        error: BottegaError = await refusal(functools.partial(shop.generate, prompt="a star", **spec(name)))
        facts = (type(error).__name__, error.message, sorted(error.metadata.items()), error.retry_after_s)
        said.add(repr(facts).replace(name, "NAME"))
    return said


def _with_lora(name: str) -> dict[str, Any]:
    return {"loras": [Lora(name=name)]}


def _with_net(name: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24)).save(buffer, "PNG")
    return {"controlnets": [ControlNet(name=name, image=buffer.getvalue())]}


async def test_a_tenants_lora_is_there_for_it_alone(shops: Shops, worker: ScriptedWorker) -> None:
    for name in ("sketch", "sketch@one"):
        drawn = await shops.one.draw(prompt="a star", **_with_lora(name))
        assert [use.name for use in drawn.provenance.parameters.loras] == ["sketch@one"]
    names = ("sketch", "sketch@one", "nothing", "nothing@one", "nothing@nobody")
    (said,) = await _refused(shops.other, _with_lora, *names)
    assert "LoraNotFound" in said
    assert len(worker.requests) == 2


async def test_a_tenants_own_lora_comes_before_the_one_for_all(shops: Shops, worker: ScriptedWorker) -> None:
    own = await shops.house.store.store.catalogue.get("ink@one")
    for shop, digest in ((shops.one, own.digest), (shops.other, shops.house.ink.digest)):
        await shop.draw(prompt="a star", **_with_lora("ink"))
        assert worker.requests[-1].spec.loras[0].digest == digest
    again = await shops.one.draw("order-1", prompt="a star", **_with_lora("ink"))
    assert (await shops.one.draw("order-1", prompt="a star", **_with_lora("ink"))).provenance == again.provenance


async def test_a_tenant_has_what_it_was_given_and_its_own(shops: Shops, worker: ScriptedWorker) -> None:
    other = image_pb2.Model()
    other.CopyFrom(MODEL)
    other.name = "other"
    await shops.house.gateway.worker("o", model=other)
    await shops.house.gateway.controlnets("s1", hosted("edges"), hosted("depth"))
    for shop, names in ((shops.bound, ["miniature"]), (shops.other, ["miniature", "other"])):
        listed = await shop.images.ListModels(image_pb2.ListModelsRequest(), timeout=60)
        assert [model.name for model in listed.models] == names
    await shops.bound.draw(prompt="a star")  # without a model: there is one only
    for name in ("ink", "wash"):
        await shops.bound.draw(prompt="a star", **_with_lora(name))
    assert worker.requests[-1].spec.loras[0].name == "wash@bound"
    for spec, names in (
        (lambda name: {"model": name}, ["other", "nothing"]),
        (_with_lora, ["sketch@one", "nothing"]),
        (_with_net, ["depth", "nothing"]),
    ):
        assert len(await _refused(shops.bound, spec, *names)) == 1


async def test_a_tenant_is_told_what_it_may_name(shops: Shops, worker: ScriptedWorker) -> None:
    nets = (hosted("edges"), hosted("depth"), hosted("depth@one"), hosted("pose@other"))
    await shops.house.gateway.controlnets("s1", *nets)
    everybodys = [("edges", "hash of edges"), ("ink", shops.house.ink.digest), ("wash", shops.house.wash.digest)]
    own = {name: (await shops.house.store.store.catalogue.get(name)).digest for name in ("ink@one", "sketch@one")}
    ones = [("depth", "hash of depth@one"), everybodys[0], ("ink", own["ink@one"]), ("sketch", own["sketch@one"])]
    others = [("depth", "hash of depth"), everybodys[0], ("pose", "hash of pose@other"), *everybodys[1:]]
    for shop, expected in ((shops.one, [*ones, everybodys[2]]), (shops.other, others)):
        assert [(each.name, each.digest) for each in await _adapters(shop)] == expected
    assert [each.name for each in await _adapters(shops.bound)] == ["edges", "ink", "wash"]
    fitting = {each.name: list(each.models) for each in await _adapters(shops.other)}
    assert (fitting["ink"], fitting["wash"], fitting["edges"]) == (["miniature"], [], ["miniature"])


async def _adapters(shop: Running) -> list[image_pb2.Adapter]:
    """Return the whole list, after a look at it page by page, and kind by kind."""
    request = image_pb2.ListAdaptersRequest()
    whole = list((await shop.images.ListAdapters(request, timeout=60)).adapters)
    one_by_one = (image_pb2.ADAPTER_KIND_CONTROLNET, image_pb2.ADAPTER_KIND_LORA)
    for kinds in ((image_pb2.ADAPTER_KIND_UNSPECIFIED,), one_by_one):
        paged: list[image_pb2.Adapter] = []
        for kind in kinds:
            request = image_pb2.ListAdaptersRequest(kind=kind, page_size=1)
            while True:
                page = await shop.images.ListAdapters(request, timeout=60)
                paged.extend(page.adapters)
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        assert paged == whole
    return whole


async def test_of_what_a_tenant_may_not_name_stores_are_asked_what_they_are_asked_of_nothing(
    shops: Shops, worker: ScriptedWorker
) -> None:
    """So that it takes as long."""
    await shops.house.store.upload("pastel", lora_file(shops.file.parent, seed=9))
    for shop, name, nothing in (
        (shops.other, "sketch", "nothing"),
        (shops.other, "sketch@one", "nothing@one"),
        (shops.bound, "pastel", "nothing"),
    ):
        asked = []
        for each in (name, nothing):
            before = await _lookups(shops)
            await refusal(functools.partial(shop.generate, **_with_lora(each)), errors.LoraNotFound)
            asked.append(await _lookups(shops) - before)
        assert asked[0] == asked[1]
        assert "OK" not in asked[0]


async def _lookups(shops: Shops) -> Counter[str]:
    """Questions for a LoRA that the store has answered, by code."""
    label = {"method": "/bottega.v1.LoraService/GetLora"}
    codes = ("OK", "NOT_FOUND")
    value = shops.house.store.server.registry.get_sample_value
    await eventually(lambda: value("bottega_rpc_in_flight") == 0)  # a call is counted a moment after its answer
    return Counter({code: int(value("bottega_rpc_calls_total", {**label, "code": code}) or 0) for code in codes})
