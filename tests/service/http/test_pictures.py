"""OpenAI's images API, called by OpenAI's own client: pictures, options, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import httpx
import openai
import pytest

from bottega.v1 import generation_pb2
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support import s3
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door, running_http
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_picture_comes_with_its_seed_usage_and_provenance(door: Door, worker: ScriptedWorker) -> None:
    answer = await door.openai.images.generate(
        prompt="a red star", n=2, size="64x64", model="miniature", user="somebody", extra_body={"bottega": {"seed": 7}}
    )
    assert answer.data
    assert [base64.b64decode(image.b64_json or "") for image in answer.data] == [b"picture 0", b"picture 1"]
    assert (answer.size, answer.output_format, answer.background) == ("64x64", "png", "opaque")
    assert answer.usage
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 8, 11)
    assert [image.bottega["seed"] for image in answer.data] == [7, 8]  # type: ignore[attr-defined]
    provenance = answer.bottega["provenance"]  # type: ignore[attr-defined]
    assert provenance["worker"] == worker.name
    assert provenance["parameters"]["seed"] == 7


async def test_parameters_reach_the_worker(door: Door, worker: ScriptedWorker) -> None:
    own = {
        "num_inference_steps": 5,
        "guidance_scale": 2.5,
        "sampler": "ddim",
        "negative_prompt": "",
        "use_beta_sigmas": False,
        "timestep_spacing": "trailing",
        "latent_parallelism": False,
        "deadline_s": 60,
        "priority": "high",
    }
    await door.openai.images.generate(
        prompt="a star", output_format="webp", output_compression=70, quality="high", extra_body={"bottega": own}
    )
    spec = worker.requests[0].spec
    assert (spec.num_inference_steps, spec.guidance_scale, spec.quality) == (5, 2.5, 70)
    assert spec.HasField("negative_prompt")
    assert (spec.HasField("use_beta_sigmas"), spec.timestep_spacing) == (True, generation_pb2.TIMESTEP_SPACING_TRAILING)
    assert spec.techniques.HasField("latent_parallelism")
    assert (spec.format, spec.fidelity) == (generation_pb2.IMAGE_FORMAT_WEBP, generation_pb2.FIDELITY_EXACT)


async def test_every_violation_is_named_as_the_caller_wrote_it(door: Door, worker: ScriptedWorker) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await door.openai.images.generate(
            prompt="a star", n=9, size="65x64", extra_body={"bottega": {"guidance_scale": 99.0}}
        )
    error = refused.value.body
    assert isinstance(error, dict)
    assert {found["field"] for found in error["bottega"]["violations"]} == {"n", "size", "bottega.guidance_scale"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert not worker.requests


_WRONG_FIELDS: Sequence[tuple[dict[str, object], str, str]] = (
    ({"steps": 4}, "steps", "did you mean bottega.num_inference_steps?"),
    ({"promt": "a"}, "promt", "did you mean prompt?"),
    ({"bottega": {"steps": 4}}, "bottega.steps", "did you mean num_inference_steps?"),
    ({"bottega": {"loras": [{"nme": "dusk"}]}}, "bottega.loras[0].nme", "did you mean name?"),
    ({"n": "2"}, "n", "must be a valid integer"),
    ({"size": "big"}, "size", "WIDTHxHEIGHT"),
    ({"background": "transparent"}, "background", "opaque pictures"),
    ({"style": "natural"}, "style", "describe the style in the prompt"),
    ({"output_compression": 50}, "output_compression", "png is lossless"),
    ({"partial_images": 2}, "partial_images", "needs stream"),
    ({"bottega": {"controlnets": [{"name": "edges", "image": "?"}]}}, "bottega.controlnets[0].image", "base64"),
)


async def test_a_wrong_field_is_refused_with_what_would_be_right(door: Door) -> None:
    for body, field, text in _WRONG_FIELDS:
        answer = await door.http.post("/v1/images/generations", json={"prompt": "a star", **body})
        assert answer.status_code == 400
        found = {item["field"]: item["description"] for item in answer.json()["error"]["bottega"]["violations"]}
        assert text in found[field], body


async def test_an_idempotency_key_is_the_request_id(door: Door, house: Running, worker: ScriptedWorker) -> None:
    headers = {"Idempotency-Key": "mine"}
    first = await door.openai.images.generate(prompt="a star", extra_headers=headers)
    again = await door.openai.images.generate(prompt="a star", extra_headers=headers)
    assert first.bottega["job_id"] == again.bottega["job_id"]  # type: ignore[attr-defined]
    assert (await house.job(first.bottega["job_id"])).request_id == "mine"  # type: ignore[attr-defined]
    with pytest.raises(openai.ConflictError) as refused:
        await door.openai.images.generate(prompt="another star", extra_headers=headers)
    assert refused.value.code == "request_id_reused"
    assert refused.value.response.headers["x-should-retry"] == "false", "OpenAI's client would repeat it"


async def test_a_client_that_leaves_cancels_its_job(door: Door, house: Running, worker: ScriptedWorker) -> None:
    worker.script.hold_at = 1
    call = asyncio.create_task(door.openai.images.generate(prompt="a star"))
    await worker.arrived.wait()
    call.cancel()
    attempt = await worker.cancelled.get()
    job = await house.ended(attempt.job_id)
    assert job.error.message
    await eventually(lambda: _has(door, 'status="499"'))


async def _has(door: Door, text: str) -> bool:
    return text in await door.metrics()


async def test_openais_client_retries_what_may_help() -> None:
    async with running_gateway() as house, running_http(house.address) as door:
        patient = door.openai.with_options(max_retries=5)
        call = asyncio.create_task(patient.images.generate(prompt="a star"))
        await eventually(lambda: _has(door, 'status="503"'))
        await house.worker()
        assert (await call).data
        with pytest.raises(openai.NotFoundError):
            await patient.images.generate(prompt="a star", model="unknown")


async def test_models_are_listed_and_found(door: Door, worker: ScriptedWorker) -> None:
    listed = [model async for model in door.openai.models.list()]
    assert [model.id for model in listed] == ["miniature"]
    assert (await door.openai.models.retrieve("miniature")).owned_by == "bottega"
    facts = (await door.http.get("/v1/models/miniature")).json()["bottega"]
    assert (facts["max_side"], facts["plain_prompts_only"], facts["takes_true_cfg"]) == (4096, False, False)
    with pytest.raises(openai.NotFoundError) as missing:
        await door.openai.models.retrieve("other")
    assert "served: miniature" in missing.value.message


async def test_a_url_shows_its_picture_until_it_expires(door: Door, worker: ScriptedWorker) -> None:
    answer = await door.openai.images.generate(prompt="a star", response_format="url")
    assert answer.data
    url = answer.data[0].url
    assert url
    async with httpx.AsyncClient() as anybody:
        picture = await anybody.get(url)
        assert (picture.content, picture.headers["content-type"]) == (b"picture 0", "image/png")
        forged = await anybody.get(url[:-4] + "AAAA")
        assert forged.status_code == 404


async def test_a_url_leads_to_the_object_storage_where_the_operator_allows_it(
    s3_servers: s3.S3Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_servers.get("nanio")
    s3.set_environment(monkeypatch, server.url)
    objects = f"s3://{server.bucket()}/pictures"
    async with running_gateway(objects=objects, objects_public_endpoint=server.url) as house:
        await house.worker()
        async with running_http(house.address) as door, httpx.AsyncClient() as anybody:
            answer = await door.openai.images.generate(prompt="a star", response_format="url")
            assert answer.data
            url = answer.data[0].url
            assert url
            assert url.startswith(server.url)
            assert (await anybody.get(url)).content == b"picture 0"
