"""The routes of OpenAI's API: models, pictures and edits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from bottega.client.transport.watching import wait_until_completed
from bottega.client.types.jobs import Completed, Event, Progress
from bottega.client.types.models import ServedModel
from bottega.client.types.picture import Picture
from bottega.errors import BottegaError, ModelNotFound, Violation
from bottega.http.bodies import Drawing, GenerationBody, drawing_of, parse_edit
from bottega.http.context import Context, context_of, fetch_images, unless_client_leaves
from bottega.http.errors import FieldsRefused, error_object
from bottega.http.events import event, event_stream, with_pings
from bottega.http.gateway import bind_key, bound_key
from bottega.http.input_images import RemoteImage, image_in
from bottega.http.pictures import (
    authorization_of,
    base64_response,
    file_response,
    new_marks,
    picture_facts,
    with_base64,
)
from bottega.rules import refuse

IMAGE_PATH = "/v1/images/files"
"""Path of the URLs of pictures, before the sealed part."""

# Pixels of a side that count as one token of a picture in `usage`, and characters that count as one of a text.
_TOKEN_PIXELS = 32
_TOKEN_CHARACTERS = 4
_MODEL_FACTS = (
    "model_hash",
    "dtype",
    "workers",
    "default_width",
    "default_height",
    "size_multiple",
    "max_pixels",
    "max_side",
    "default_steps",
    "default_guidance_scale",
    "default_sampler",
    "default_strength",
    "default_edit_strength",
    "edits_refused_because",
    "edits_only",
    "plain_prompts_only",
    "embeds_guidance",
    "takes_true_cfg",
    "max_sequence_length",
    "guidance_from_zero",
)


async def list_models(request: Request) -> Response:
    """Return the models that are served now."""
    models = await context_of(request).client.models()
    return _json({"object": "list", "data": [_model_object(model) for model in models]})


async def get_model(request: Request) -> Response:
    """Return a model that is served now."""
    models = await context_of(request).client.models()
    name = request.path_params["model"]
    for model in models:
        if model.name == name:
            return _json(_model_object(model))
    served = ", ".join(model.name for model in models)
    raise ModelNotFound(f"no worker serves a model of that name; served: {served}", metadata={"served": served})


async def create_pictures(request: Request) -> Response:
    """Draw pictures."""
    body = await context_of(request).bodies.read_json(request, GenerationBody)
    await fetch_images(request, body)
    return await _draw(request, _Request(body=body, drawing=drawing_of(body), kind="image_generation"))


async def edit_picture(request: Request) -> Response:
    """Draw an image anew where its mask is transparent, or all of it without a mask."""
    fields, files = await context_of(request).bodies.read_form(request)
    named = _images_in_texts(fields, files)
    body = await asyncio.to_thread(parse_edit, fields)
    images = await fetch_images(request, body, named)
    files.update((name, [image]) for name, image in images.items())
    drawing = drawing_of(body, **_files(files))
    return await _draw(request, _Request(body=body, drawing=drawing, kind="image_edit", images=1))


async def get_file(request: Request) -> Response:
    """Return the picture of a URL that an answer had."""
    context = context_of(request)
    job_id, index, key = context.urls.open(request.path_params["token"])
    bind_key(authorization_of(key))
    return await file_response(request, context.client.job(job_id), index)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request that draws."""

    body: GenerationBody
    drawing: Drawing
    kind: str
    """First part of the names of events."""
    images: int = 0
    """Number of input images."""

    def facts(self, picture: Picture | None = None, *, output_format: str = "") -> dict[str, object]:
        """Return what OpenAI's answers and events say of the pictures."""
        quality = {"standard": "medium", "hd": "high", None: "auto"}.get(self.body.quality, self.body.quality)
        size = f"{picture.width}x{picture.height}" if picture else self.body.size or "auto"
        return {
            "background": "opaque",
            "output_format": output_format or (picture.format if picture else self.body.output_format or "png"),
            "quality": quality,
            "size": size,
        }

    def usage(self, pictures: tuple[Picture, ...]) -> dict[str, object]:
        """Return estimates of the tokens: a token is 4 characters of the prompt, or 32 x 32 pixels."""
        each = [
            math.ceil(picture.width / _TOKEN_PIXELS) * math.ceil(picture.height / _TOKEN_PIXELS) for picture in pictures
        ]
        text, drawn = math.ceil(len(self.drawing.prompt) / _TOKEN_CHARACTERS), sum(each)
        given = self.images * max(each, default=0)
        return {
            "input_tokens": text + given,
            "input_tokens_details": {"text_tokens": text, "image_tokens": given},
            "output_tokens": drawn,
            "output_tokens_details": {"text_tokens": 0, "image_tokens": drawn},
            "total_tokens": text + given + drawn,
        }


async def _draw(request: Request, wanted: _Request) -> Response:
    context, drawing, body = context_of(request), wanted.drawing, wanted.body
    events = context.client.stream(
        drawing.prompt,
        num_images=drawing.num_images,
        preview=bool(body.stream and body.partial_images),
        deadline_s=drawing.deadline_s,
        request_id=request.headers.get("idempotency-key") or None,
        priority=drawing.priority,
        **drawing.options,
    )
    if body.stream:
        return await _streamed(request, wanted, events)
    done = await unless_client_leaves(request, wait_until_completed(events))
    return await _answer(context, request, wanted, done)


async def _answer(context: Context, request: Request, wanted: _Request, done: Completed) -> Response:
    marks = new_marks(len(done.images))
    as_url = wanted.body.response_format == "url"
    data: list[dict[str, object]] = []
    for mark, picture in zip(marks, done.images, strict=True):
        shown = await _url_of(context, request, picture) if as_url else mark
        data.append({"url" if as_url else "b64_json": shown, "bottega": picture_facts(picture)})
    answer = {
        "created": int(time.time()),
        **wanted.facts(done.images[0]),
        "data": data,
        "usage": wanted.usage(done.images),
        "bottega": {"job_id": done.job_id, "provenance": done.provenance},
    }
    text = to_json(answer, inf_nan_mode="null")
    if as_url:
        return Response(text, media_type="application/json")
    return base64_response(text, marks, [picture.data for picture in done.images])


async def _url_of(context: Context, request: Request, picture: Picture) -> str:
    """Return a URL of object storage, if the gateway's operator allows it, else one of this service."""
    if url := await context.client.job(picture.job_id).image_url(picture.index):
        return url
    return context.url(request, f"{IMAGE_PATH}/{context.urls.seal(picture, bound_key())}")


async def _streamed(request: Request, wanted: _Request, events: AsyncGenerator[Event, None]) -> Response:
    """Return a stream of events. Errors before the first one are the answer's status."""
    try:
        first = await unless_client_leaves(request, _first(events))
    except BaseException:
        await events.aclose()
        raise
    return event_stream(with_pings(_event_parts(wanted, first, events)))


async def _first(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


async def _event_parts(
    wanted: _Request, first: Event, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[bytes, None]:
    partial, wanted_partials = 0, wanted.body.partial_images or 0
    async with aclosing(events):
        current: Event | None = first
        try:
            while current is not None:
                if isinstance(current, Progress) and current.previews and partial < wanted_partials:
                    share = current.steps_done / max(1, current.steps_total)
                    if share >= (partial + 1) / (wanted_partials + 1):
                        for part in _partial_parts(wanted, current, partial):
                            yield part
                        partial += 1
                if isinstance(current, Completed):
                    for part in _completed_parts(wanted, current):
                        yield part
                    return
                current = await anext(events, None)
        except BottegaError as error:
            yield event("error", {"type": "error", "error": error_object(error)})


def _partial_parts(wanted: _Request, progress: Progress, number: int) -> Iterator[bytes]:
    for preview in progress.previews:
        (mark,) = new_marks(1)
        name = f"{wanted.kind}.partial_image"
        data = {
            "type": name,
            "b64_json": mark,
            "created_at": int(time.time()),
            "partial_image_index": number,
            **wanted.facts(output_format="jpeg"),
            "bottega": {
                "job_id": progress.job_id,
                "index": preview.index,
                "steps_done": progress.steps_done,
                "steps_total": progress.steps_total,
            },
        }
        yield from with_base64(event(name, data), [mark], [preview.jpeg])


def _completed_parts(wanted: _Request, done: Completed) -> Iterator[bytes]:
    for picture in done.images:
        (mark,) = new_marks(1)
        name = f"{wanted.kind}.completed"
        data = {
            "type": name,
            "b64_json": mark,
            "created_at": int(time.time()),
            **wanted.facts(picture),
            "usage": wanted.usage((picture,)),
            "bottega": {"job_id": done.job_id, **picture_facts(picture), "provenance": done.provenance},
        }
        yield from with_base64(event(name, data), [mark], [picture.data])


def _images_in_texts(fields: dict[str, object], files: dict[str, list[bytes]]) -> dict[str, RemoteImage]:
    """Take the images out of a form's fields: put those in base64 into its files, and return those by URL."""
    remote = {}
    for name in fields.keys() & {"image", "mask"}:
        text = fields.pop(name)
        texts = text if isinstance(text, list) else [text]
        try:
            image = image_in(texts[0])
        except ValueError as error:
            raise FieldsRefused(f"{name} {error}", violations=[Violation(field=name, description=str(error))]) from None
        if name in files or len(texts) > 1:
            raise FieldsRefused(f"{name} must be one", violations=[Violation(field=name, description="must be one")])
        if isinstance(image, RemoteImage):
            remote[name] = image
        else:
            files[name] = [image]
    return remote


def _files(files: Mapping[str, list[bytes]]) -> dict[str, bytes]:
    """Return the image of a form and its mask, if there is one. Raise InvalidRequest for other files."""
    images, masks = files.get("image", []), files.get("mask", [])
    refuse(
        [
            *(Violation(field=name, description="there is no such file") for name in files.keys() - {"image", "mask"}),
            *([] if images else [Violation(field="image", description="is missing: send a file")]),
            *([Violation(field="image", description="must be one: an edit has one source")] if len(images) > 1 else []),
            *([Violation(field="mask", description="must be one")] if len(masks) > 1 else []),
        ],
        FieldsRefused,
    )
    return {"image": images[0], **({"mask": masks[0]} if masks else {})}


def _model_object(model: ServedModel) -> dict[str, object]:
    facts = {name: getattr(model, name) for name in _MODEL_FACTS}
    usable = (choice.sampler for choice in model.sampler_choices if not choice.refused_because)
    facts["samplers"] = [*dict.fromkeys(usable)]
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "bottega", "bottega": facts}


def _json(value: object) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
