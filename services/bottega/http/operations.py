"""The operations of the API: their routes, and the document /openapi.json, which describes them."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from bottega.client.types.options import EditOptions, GenerationOptions
from bottega.http import openai_routes, page_routes, suite_routes
from bottega.http.answers import (
    AdaptersAnswer,
    ErrorAnswer,
    FleetAnswer,
    JobAnswer,
    JobsAnswer,
    ModelAnswer,
    ModelsAnswer,
    PicturesAnswer,
    TraceAnswer,
)
from bottega.http.bodies import BottegaBody, EditBody, GenerationBody, JobBody
from bottega.http.suite_routes import EventsQuery, JobQuery
from bottega.webhook_payload import WebhookPayload

_FILES: Mapping[str, object] = {
    "image": {"type": "string", "format": "binary", "description": "Source of the edit: PNG, JPEG or WebP, or a URL."},
    "mask": {"type": "string", "format": "binary", "description": "Mask: what is transparent is drawn anew; or a URL."},
}
_STREAM = "text/event-stream"
_PICTURES = ("image/png", "image/jpeg", "image/webp")
_OF_PICTURES = ("Range", "If-Range", "If-None-Match")
_STATUSES_OF_PICTURES = {
    206: "The range of the picture.",
    304: "The client has the picture.",
    416: "The picture has no such range.",
}
_KEY = "Idempotency-Key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a route, and its description for /openapi.json."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    """Answers a request. Its docstring describes the operation."""
    body: type[BaseModel] | None = None
    """Model of the request's body, in JSON; of EditBody a form."""
    query: type[BaseModel] | None = None
    """Model of the parameters in the query."""
    status: int = 200
    answer: type[BaseModel] | None = None
    """Model of the answer in JSON."""
    media_types: tuple[str, ...] = ()
    """Media types of answers that `answer` does not describe."""
    headers: tuple[str, ...] = ()
    """Headers of requests that the operation reads."""
    other_statuses: Mapping[int, str] = field(default_factory=dict)
    """Descriptions of further answers by their status; 206 has the same media types."""

    @property
    def route(self) -> str:
        """The path with the types of its parameters. Names of models and of files may have slashes."""
        path = self.path.replace("{model}", "{model:path}").replace("{name}", "{name:path}")
        return path.replace("{index}", "{index:int}")

    @property
    def draws(self) -> bool:
        """Whether the operation starts a job."""
        return self.body is not None


async def get_openapi(_: Request) -> Response:
    """Return this document."""
    return Response(_document(), media_type="application/json")


OPERATIONS = (
    Operation(method="GET", path="/", handler=page_routes.get_page, media_types=("text/html",)),
    Operation(
        method="GET",
        path="/page/{name}",
        handler=page_routes.get_page_file,
        media_types=("text/css", "text/javascript"),
    ),
    Operation(method="GET", path="/openapi.json", handler=get_openapi, media_types=("application/json",)),
    Operation(method="GET", path="/v1/models", handler=openai_routes.list_models, answer=ModelsAnswer),
    Operation(method="GET", path="/v1/models/{model}", handler=openai_routes.get_model, answer=ModelAnswer),
    Operation(method="GET", path="/v1/loras", handler=suite_routes.list_loras, answer=AdaptersAnswer),
    Operation(method="GET", path="/v1/controlnets", handler=suite_routes.list_controlnets, answer=AdaptersAnswer),
    Operation(method="GET", path="/v1/fleet", handler=suite_routes.get_fleet, answer=FleetAnswer),
    Operation(
        method="POST",
        path="/v1/images/generations",
        handler=openai_routes.create_pictures,
        body=GenerationBody,
        answer=PicturesAnswer,
        media_types=(_STREAM,),
    ),
    Operation(
        method="POST",
        path="/v1/images/edits",
        handler=openai_routes.edit_picture,
        body=EditBody,
        answer=PicturesAnswer,
        media_types=(_STREAM,),
    ),
    Operation(
        method="GET",
        path=openai_routes.IMAGE_PATH + "/{token}",
        handler=openai_routes.get_file,
        media_types=_PICTURES,
        headers=_OF_PICTURES,
        other_statuses=_STATUSES_OF_PICTURES,
    ),
    Operation(
        method="POST", path="/v1/jobs", handler=suite_routes.start_job, body=JobBody, status=202, answer=JobAnswer
    ),
    Operation(method="GET", path="/v1/jobs", handler=suite_routes.list_jobs, query=JobQuery, answer=JobsAnswer),
    Operation(method="GET", path="/v1/jobs/{job_id}", handler=suite_routes.get_job, answer=JobAnswer),
    Operation(method="DELETE", path="/v1/jobs/{job_id}", handler=suite_routes.delete_job, status=204),
    Operation(method="POST", path="/v1/jobs/{job_id}/cancel", handler=suite_routes.cancel_job, answer=JobAnswer),
    Operation(
        method="GET",
        path="/v1/jobs/{job_id}/events",
        handler=suite_routes.watch_job,
        query=EventsQuery,
        media_types=(_STREAM,),
        headers=("Last-Event-ID",),
        other_statuses={204: "The client has the last event."},
    ),
    Operation(
        method="GET",
        path="/v1/jobs/{job_id}/images/{index}",
        handler=suite_routes.get_picture,
        media_types=_PICTURES,
        headers=_OF_PICTURES,
        other_statuses=_STATUSES_OF_PICTURES,
    ),
    Operation(method="GET", path="/v1/jobs/{job_id}/trace", handler=suite_routes.get_trace, answer=TraceAnswer),
)


@functools.cache
def _document() -> bytes:
    return to_json(openapi())


def openapi() -> dict[str, object]:
    """Return the description of the API in OpenAPI 3.1."""
    models: set[type[BaseModel]] = {ErrorAnswer, WebhookPayload}
    for found in OPERATIONS:
        models.update(model for model in (found.body, found.query, found.answer) if model is not None)
    ordered = sorted(models, key=lambda model: model.__name__)
    references, schemas = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    schemas["$defs"][BottegaBody.__name__]["properties"] = _described(schemas["$defs"][BottegaBody.__name__])
    form = schemas["$defs"][EditBody.__name__]
    form["properties"] = {**form["properties"], **_FILES}
    form["required"] = [*form["required"], "image"]
    of_model = {model: references[model, "validation"] for model in ordered}
    paths: dict[str, dict[str, object]] = {}
    for found in OPERATIONS:
        paths.setdefault(found.path, {})[found.method.lower()] = _operation(found, of_model, schemas["$defs"])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bottega",
            "version": importlib.metadata.version("bottega-services"),
            "description": "OpenAI's API for images, and jobs with streams of events.",
        },
        "paths": paths,
        "webhooks": {"job": {"post": _webhook(of_model[WebhookPayload])}},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _webhook(payload: object) -> object:
    """Return the description of the request that a receiver of webhooks gets."""
    described = {
        "webhook-id": "ID of the event; the same event may come more than once.",
        "webhook-timestamp": "Time of the delivery, in Unix seconds.",
        "webhook-signature": "Signatures after Standard Webhooks (https://www.standardwebhooks.com).",
    }
    return {
        "operationId": "job_ended",
        "summary": "The end of a job, sent to the URL of its webhook.",
        "parameters": [
            {"name": name, "in": "header", "required": True, "description": text, "schema": {"type": "string"}}
            for name, text in described.items()
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": payload}}},
        "responses": {"2XX": {"description": "The receiver accepts it. Any other answer is retried."}},
        "security": [],
    }


def _operation(found: Operation, of_model: Mapping[type[BaseModel], object], schemas: Mapping[str, object]) -> object:
    summary, _, description = (inspect.getdoc(found.handler) or "").partition("\n\n")
    content = {media_type: {"schema": {"type": "string"}} for media_type in found.media_types}
    if found.answer is not None:
        content["application/json"] = {"schema": of_model[found.answer]}  # type: ignore[dict-item]
    answer: dict[str, object] = {"description": "The answer."}
    operation: dict[str, object] = {
        "operationId": found.handler.__name__,
        "summary": summary,
        "parameters": [*_parameters(found, schemas)],
        "responses": {
            str(found.status): answer | ({"content": content} if content else {}),
            **{
                str(status): {"description": text} | ({"content": content} if status == 206 else {})
                for status, text in found.other_statuses.items()
            },
            "default": {
                "description": "An error in OpenAI's form.",
                "content": {"application/json": {"schema": of_model[ErrorAnswer]}},
            },
        },
    }
    if description:
        operation["description"] = " ".join(description.split())
    if found.body is EditBody:
        form = {"multipart/form-data": {"schema": of_model[EditBody]}}
        operation["requestBody"] = {"required": True, "content": form}
    elif found.body is not None:
        json_body = {"application/json": {"schema": of_model[found.body]}}
        operation["requestBody"] = {"required": True, "content": json_body}
    return operation


def _parameters(found: Operation, schemas: Mapping[str, object]) -> list[object]:
    parameters: list[object] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "integer" if name == "index" else "string"}}
        for name in re.findall(r"\{(\w+)\}", found.path)
    ]
    if found.draws:
        text = "Id of the request: the same id with the same body gives the same pictures, drawn once."
        parameters.append({"name": _KEY, "in": "header", "schema": {"type": "string"}, "description": text})
    parameters += [{"name": name, "in": "header", "schema": {"type": "string"}} for name in found.headers]
    if found.query is not None:
        properties = found.query.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
        for name, schema in properties.items():
            parameters.append({"name": name, "in": "query", "schema": schema, "style": "form", "explode": True})
    return parameters


def _described(schema: Mapping[str, Mapping[str, dict[str, object]]]) -> dict[str, dict[str, object]]:
    """Return the properties of BottegaBody with the SDK's descriptions of its arguments."""
    texts = {**_attributes(EditOptions), **_attributes(GenerationOptions)}
    return {name: {"description": texts.get(name, ""), **value} for name, value in schema["properties"].items()}


def _attributes(documented: type) -> dict[str, str]:
    """Return the descriptions in the section "Attributes" of a docstring, by name."""
    section = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
