"""The document that describes the API, and that its bodies have every parameter of the SDK."""

from __future__ import annotations

import dataclasses
import json

from openapi_spec_validator import validate

from bottega.client.types.inputs import ControlNet, Lora
from bottega.client.types.options import GenerationOptions
from bottega.http.bodies import BottegaBody, ControlNetBody, LoraBody
from bottega.http.operations import OPERATIONS, openapi

# Parameters of the SDK that a body has under another name, beside `bottega`.
_ELSEWHERE = {"model", "width", "height", "format", "quality", "image", "mask_image", "mask_alpha", "lora"}


def test_the_document_is_valid_and_has_every_operation() -> None:
    document = json.loads(json.dumps(openapi()))
    validate(document)
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(found.path, found.method) for found in OPERATIONS}


def test_every_parameter_of_the_sdk_is_in_the_body_and_described() -> None:
    wanted = set(GenerationOptions.__annotations__) - _ELSEWHERE
    assert wanted <= set(BottegaBody.model_fields), "add it to bottega.http.bodies.BottegaBody"
    for body, type_of_sdk in ((ControlNetBody, ControlNet), (LoraBody, Lora)):
        assert {field.name for field in dataclasses.fields(type_of_sdk)} == set(body.model_fields)
    schemas = openapi()["components"]["schemas"]  # type: ignore[index]
    described = schemas["BottegaBody"]["properties"]
    assert not [name for name, schema in described.items() if not schema["description"]]
