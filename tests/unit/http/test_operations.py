"""The document that describes the API, and that its bodies have every parameter of the SDK."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from bottega.client.types.inputs import ControlNet, Lora
from bottega.client.types.options import GenerationOptions
from bottega.http.bodies import BottegaBody, ControlNetBody, EditBody, LoraBody
from bottega.http.operations import OPERATIONS, Operation, openapi

# Parameters of the SDK that a body has under another name, beside `bottega`.
_ELSEWHERE = {"model", "width", "height", "format", "quality", "image", "mask_image", "mask_alpha", "lora"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(openapi()))
    return read


def test_the_document_is_valid_and_has_every_operation(document: dict[str, Any]) -> None:
    validate(document)
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(found.path, found.method) for found in OPERATIONS}


def test_every_parameter_of_the_sdk_is_in_the_body_and_described(document: dict[str, Any]) -> None:
    wanted = set(GenerationOptions.__annotations__) - _ELSEWHERE
    assert wanted <= set(BottegaBody.model_fields), "add it to bottega.http.bodies.BottegaBody"
    for body, type_of_sdk in ((ControlNetBody, ControlNet), (LoraBody, Lora)):
        assert {field.name for field in dataclasses.fields(type_of_sdk)} == set(body.model_fields)
    described = document["components"]["schemas"]["BottegaBody"]["properties"]
    assert not [name for name, schema in described.items() if not schema["description"]]


@pytest.mark.parametrize("found", [found for found in OPERATIONS if found.body], ids=lambda found: found.path)
def test_a_valid_body_has_the_form_that_the_document_describes(found: Operation, document: dict[str, Any]) -> None:
    (content,) = document["paths"][found.path]["post"]["requestBody"]["content"].values()
    validator = Draft202012Validator({**document, **content["schema"]})
    body = {"prompt": "a star", "n": 2, "bottega": {"seed": 7}}
    if found.body is EditBody:
        assert not validator.is_valid(body), "the image is missing"
        body |= {"image": "png", "mask": "png"}
    validator.validate(body)
    assert not validator.is_valid({**body, "steps": 4})


def test_the_document_describes_webhooks(document: dict[str, Any]) -> None:
    received = document["webhooks"]["job"]["post"]
    assert {found["name"] for found in received["parameters"]} == {
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
    }
    schema = received["requestBody"]["content"]["application/json"]["schema"]
    assert not Draft202012Validator({**document, **schema}).is_valid({"type": "job.started"})


def test_the_document_has_what_clients_of_files_and_streams_need(document: dict[str, Any]) -> None:
    paths = document["paths"]
    picture = paths["/v1/jobs/{job_id}/images/{index}"]["get"]
    assert {"206", "304", "416"} <= picture["responses"].keys()
    kinds = {found["name"]: found["schema"]["type"] for found in picture["parameters"]}
    assert kinds["index"] == "integer"
    assert "Range" in kinds
    events = paths["/v1/jobs/{job_id}/events"]["get"]
    assert "204" in events["responses"]
    assert "Last-Event-ID" in {found["name"] for found in events["parameters"]}
