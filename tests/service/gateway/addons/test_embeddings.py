"""Textual inversion embeddings of a real store in a real gateway: who may name them, and what requests are refused."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from bottega import errors
from bottega.rpc.security.caller import Grants
from bottega.v1 import image_pb2
from bottega.v1 import lora_pb2 as pb
from bottega.v1.generation_pb2 import Lora
from tests.samples.lora_files import save
from tests.support import running_loras
from tests.support.gateway_with_loras import House, lora_house
from tests.support.running_gateway import refusal
from tests.support.running_loras import PATIENCE_S
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with lora_house(tmp_path) as made:
        yield made


def embedding_file(folder: Path, *, seed: int = 0, count: int = 2) -> Path:
    """Return a file of the embedded model's, without a token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(count, 64, generator=generator) for name in ("clip_l", "clip_g")}
    return save(tensors, folder / f"embedding-{seed}-{count}.safetensors")


async def test_a_request_gets_the_token_and_digest_of_the_embedding_that_it_names(house: House, tmp_path: Path) -> None:
    worker = await house.gateway.worker()
    toy = await house.store.upload("toy", embedding_file(tmp_path), trigger_words=["<Toy>"])
    assert (toy.token, list(toy.trigger_words), toy.format) == ("<toy>", ["<toy>"], "textual inversion")
    assert (toy.rank, toy.modules) == (0, 2)
    listed = await house.store.stub.ListLoras(pb.ListLorasRequest(), timeout=PATIENCE_S)
    assert {lora.name: lora.token for lora in listed.loras} == {"ink": "", "toy": "<toy>", "wash": ""}
    # Lateness is the LoRA's; an embedding is there from the first step on.
    asked = [Lora(name="ink"), Lora(name="toy", max_step=0, token="<ink>")]
    await house.gateway.draw(prompt="a <toy> star", loras=asked, techniques={"bounded_lora_loading": True})
    ((ink, drawn),) = [request.spec.loras for request in worker.requests]
    assert (drawn.name, drawn.digest, drawn.token, drawn.scale, drawn.max_step) == ("toy", toy.digest, "<toy>", 1.0, 0)
    assert (ink.token, ink.max_step > 0) == ("", True)
    await eventually(lambda: house.store.store._cache.state(toy.digest) is True)
    error = await running_loras.refused(house.store.stub.DeleteLora(pb.DeleteLoraRequest(name="toy"), timeout=60))
    assert isinstance(error, errors.LoraInUse)


async def test_the_parameters_of_a_picture_with_embeddings_draw_it_again(house: House, tmp_path: Path) -> None:
    worker = await house.gateway.worker()
    worker.script.loras_step = 2
    await house.store.upload("toy", embedding_file(tmp_path), trigger_words=["<toy>"])
    for loras, step in (([Lora(name="toy")], 0), ([Lora(name="toy"), Lora(name="ink")], 2)):
        late = {"bounded_lora_loading": True}
        drawn = await house.gateway.draw(prompt="a <toy>", loras=loras, techniques=late)
        again = drawn.provenance.parameters.loras
        assert [(lora.from_step, lora.max_step) for lora in again if lora.token] == [(step, 0)]
        await house.gateway.draw(prompt="a <toy>", loras=again, techniques=late)


async def test_another_token_is_another_embedding(house: House, tmp_path: Path) -> None:
    path = embedding_file(tmp_path)
    toy = await house.store.upload("toy", path)
    assert toy.token == "toy"
    assert (await house.store.upload("toy", path)).digest == toy.digest
    other = await house.store.upload("other", path, trigger_words=["<other>"])
    assert other.digest != toy.digest
    data = await asyncio.to_thread(path.read_bytes)
    for name, words, says in (
        ("toy", ["<other>"], "toy exists already with other weights"),
        ("new", ["<a>", "<b>"], "an embedding has one trigger word, its token"),
    ):
        requests = running_loras.upload_requests(name, data, trigger_words=words)
        error = await running_loras.refused(house.store.stub.UploadLora(requests, timeout=PATIENCE_S))
        assert says in error.message


_EARLY = "for an embedding: its vectors are in the prompt, which is encoded before the first step"
_UNUSED = "name: is an embedding whose token <toy> is in no prompt: write it there, in small letters"


async def test_an_embedding_that_would_not_be_drawn_as_meant_is_refused(house: House, tmp_path: Path) -> None:
    await house.gateway.worker()
    path = embedding_file(tmp_path)
    for name, token in (("toy", "<toy>"), ("toys", "a<toy>s")):
        await house.store.upload(name, path, trigger_words=[token])
    cases: list[tuple[list[Lora], str, str]] = [
        (
            [Lora(name="toy", scale=0.5)],
            "",
            "scale: must be 1 for an embedding: weigh its token in a weighted prompt, such as (<toy>:1.2)",
        ),
        ([Lora(name="toy", measure_similarity=True)], "", "measure_similarity: must be false for an embedding"),
        ([Lora(name="toy", max_step=3)], "", f"max_step: must be absent or 0 {_EARLY}"),
        ([Lora(name="toy", from_step=3)], "", f"from_step: must be absent or 0 {_EARLY}"),
        ([Lora(name="toy")], "a star", _UNUSED),
        ([Lora(name="toy")], "a <TOY>", _UNUSED),
        (
            [Lora(name="toy"), Lora(name="toys")],
            "",
            "whose token a<toy>s cannot be told from <toy>, that of another embedding",
        ),
        ([Lora(name="toy")], "<toy>" * 800, "have 1600 vectors in a prompt: at most 1500 are drawn"),
    ]
    for loras, prompt, says in cases:
        call = functools.partial(house.gateway.generate, prompt=prompt or "a <toy> and a<toy>s", loras=loras)
        assert says in (await refusal(call, errors.InvalidRequest)).message


async def test_a_tenant_names_its_own_embeddings_and_those_that_it_was_granted(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key, other_key = add_tenant(file, "shop"), add_tenant(file, "mill", grants=Grants(loras=("shared",)))
    async with lora_house(tmp_path, tenants=str(file)) as house, calling(house.gateway, key) as shop:
        worker = await house.gateway.worker()
        own = await house.store.upload("toy@shop", embedding_file(tmp_path), trigger_words=["<toy>"])
        await house.store.upload("shared", embedding_file(tmp_path, seed=1))
        await shop.draw(prompt="a <toy>", loras=[Lora(name="toy")])
        ((drawn,),) = [request.spec.loras for request in worker.requests]
        assert (drawn.name, drawn.digest, drawn.token) == ("toy@shop", own.digest, "<toy>")
        async with calling(house.gateway, other_key) as mill:
            await mill.draw(prompt="a shared", loras=[Lora(name="shared")])
            await refusal(lambda: mill.generate(prompt="a <toy>", loras=[Lora(name="toy")]), errors.LoraNotFound)
            listed = await mill.images.ListAdapters(image_pb2.ListAdaptersRequest(), timeout=PATIENCE_S)
            assert [(item.name, list(item.trigger_words)) for item in listed.adapters] == [("shared", ["shared"])]
