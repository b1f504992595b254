"""Edits over HTTP, by OpenAI's own client and as plain forms: the image, its mask, and wrong forms."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Sequence

import PIL.Image
import pytest
import pytest_asyncio

from tests.fakes.scripted_controlnet import hosted
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[Running]:
    """A gateway that inspects images."""
    async with running_gateway(codec_processes=1) as running:
        yield running


def _png(mode: str = "RGB") -> bytes:
    image = PIL.Image.new(mode, (64, 64), "white")
    if mode == "RGBA":
        image.paste((0, 0, 0, 0), (8, 8, 40, 40))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


async def test_an_edit_draws_where_its_mask_is_transparent(door: Door, worker: ScriptedWorker) -> None:
    own = {"seed": 5, "num_inference_steps": 3, "mask_feather": 2, "identical_results": False}
    answer = await door.openai.images.edit(
        image=("image.png", _png("RGB"), "image/png"),
        mask=("mask.png", _png("RGBA"), "image/png"),
        prompt="a green star",
        extra_body={"bottega": own},
    )
    assert answer.data
    assert base64.b64decode(answer.data[0].b64_json or "") == b"picture 0"
    assert answer.usage
    assert answer.usage.input_tokens_details.image_tokens == 4
    spec = worker.requests[0].spec
    assert (spec.image, spec.mask_image, spec.mask_alpha) == (_png("RGB"), _png("RGBA"), True)
    assert (spec.seed, spec.num_inference_steps, spec.mask_feather) == (5, 3, 2)


async def test_the_mode_of_a_control_image_reaches_the_worker(
    door: Door, house: Running, worker: ScriptedWorker
) -> None:
    await house.controlnets("s1", hosted("union", control_modes=8))
    image = base64.b64encode(_png("RGB")).decode()
    nets = [{"name": "union", "image": image, "control_mode": mode} for mode in ("depth", 7)]
    await door.openai.images.generate(prompt="a star", extra_body={"bottega": {"controlnets": nets}})
    assert [net.control_mode for net in worker.requests[0].spec.controlnets] == ["depth", "7"]


async def test_an_edit_streams_its_own_events(door: Door, worker: ScriptedWorker) -> None:
    form = {"prompt": "a star", "stream": "true", "partial_images": "1", "bottega": json.dumps({"seed": 2})}
    answer = await door.http.post("/v1/images/edits", data=form, files={"image[]": ("a.png", _png("RGB"))})
    assert answer.status_code == 200
    assert "event: image_edit.completed\n" in answer.text
    assert worker.requests[0].spec.seed == 2


_WRONG_FORMS: Sequence[tuple[list[tuple[str, bytes]], dict[str, str], str, str]] = (
    ([], {}, "image", "is missing"),
    ([("image[]", b"1"), ("image[]", b"2")], {}, "image", "one source"),
    ([("image", b"1"), ("sketch", b"2")], {}, "sketch", "no such file"),
    ([("image", b"1")], {"input_fidelity": "high"}, "input_fidelity", "bottega.strength"),
    ([("image", b"1")], {"bottega": "{"}, "bottega", "JSON"),
    ([("image", b"1")], {"bottega[steps]": "1"}, "bottega.steps", "num_inference_steps"),
    ([("image", b"1")], {"bottega[seed]": "x"}, "bottega.seed", "integer"),
)


async def test_a_wrong_form_is_refused(door: Door) -> None:
    for files, form, field, text in _WRONG_FORMS:
        sent = [(name, ("a.png", data)) for name, data in files] or [("other", ("a.png", b"1"))]
        answer = await door.http.post("/v1/images/edits", data={"prompt": "a star", **form}, files=sent)
        assert answer.status_code == 400, answer.text
        found = {item["field"]: item["description"] for item in answer.json()["error"]["bottega"]["violations"]}
        assert text in found[field]
