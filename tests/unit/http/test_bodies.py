"""The bodies of requests: that a small one never takes much memory, and bodies of known clients."""

from __future__ import annotations

import json

import pytest

from bottega.errors import InvalidRequest
from bottega.http.bodies import GenerationBody, JobBody, drawing_of, parse_edit, parse_json
from bottega.rules import MAX_ADAPTERS, MAX_STEPS

_LARGE = {
    "bottega.controlnets": {"controlnets": [{}] * 300_000},
    "bottega.loras": {"loras": [{"name": "dusk"}] * 20_000},
    "bottega.timesteps": {"timesteps": [""] * 20_000},
    "body": {f"unknown_{number}": 1 for number in range(30_000)},
}


@pytest.mark.parametrize("field", _LARGE)
def test_a_body_of_many_values_breaks_one_rule_not_one_for_each(field: str) -> None:
    body = json.dumps({"prompt": "a", "bottega": _LARGE[field]}).encode()
    form = {"prompt": "a", "bottega": json.dumps(_LARGE[field])}
    for parse in (lambda: parse_json(JobBody, body), lambda: parse_edit(form)):
        with pytest.raises(InvalidRequest) as refused:
            parse()
        assert len(refused.value.violations) == 1


def test_lists_have_the_gateways_bounds() -> None:
    for own, field, most in (
        ({"loras": [{"name": "dusk"}] * (MAX_ADAPTERS + 1)}, "bottega.loras", MAX_ADAPTERS),
        ({"timesteps": [1] * (MAX_STEPS + 1)}, "bottega.timesteps", MAX_STEPS),
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse_json(GenerationBody, json.dumps({"prompt": "a", "bottega": own}).encode())
        (violation,) = refused.value.violations
        assert violation.field == field
        assert violation.description.startswith(f"must have at most {most} items")


# Bodies as other clients send them to endpoints compatible with OpenAI's, and what each asks for.
_OF_CLIENTS = (
    # Open WebUI.
    (
        {"model": "sdxl", "prompt": "a star", "n": 1, "size": "512x512", "response_format": "b64_json"},
        {"model": "sdxl", "width": 512, "height": 512},
    ),
    ({"model": "sdxl", "prompt": "a star", "n": 1, "size": "auto"}, {"model": "sdxl"}),
    # SillyTavern: generateOpenAiImage in public/scripts/extensions/stable-diffusion/index.js, whose body
    # src/endpoints/openai.js passes on. Quality and style are sent for dall-e-3 alone, whose width or height is 1792.
    (
        {"prompt": "a star", "model": "dall-e-2", "size": "512x512", "n": 1, "response_format": "b64_json"},
        {"model": "dall-e-2", "width": 512, "height": 512},
    ),
    (
        {
            "prompt": "a star",
            "model": "dall-e-3",
            "size": "1024x1792",
            "n": 1,
            "quality": "standard",
            "style": "vivid",
            "response_format": "b64_json",
        },
        {"model": "dall-e-3", "width": 1024, "height": 1792, "fidelity": None},
    ),
    (
        {"prompt": "a star", "model": "dall-e-3", "size": "1024x1024", "n": 1, "quality": "hd", "style": "vivid"},
        {"fidelity": "exact"},
    ),
    # Fields of OpenAI's newer models.
    (
        {"prompt": "a star", "model": "sdxl", "size": "1024x768", "n": 1, "quality": "high", "moderation": "low"},
        {"width": 1024, "height": 768, "fidelity": "exact"},
    ),
)


@pytest.mark.parametrize(("body", "options"), _OF_CLIENTS)
def test_bodies_of_other_clients_are_served(body: dict[str, object], options: dict[str, object]) -> None:
    drawing = drawing_of(parse_json(GenerationBody, json.dumps(body).encode()))
    assert (drawing.prompt, drawing.num_images) == ("a star", 1)
    assert drawing.options.items() >= options.items()


def test_a_form_of_another_client_is_served() -> None:
    fields = {"model": "sdxl", "prompt": "a star", "n": "1", "size": "512x512", "response_format": "b64_json"}
    drawing = drawing_of(parse_edit({**fields, "background": "auto"}), image=b"png")
    assert (drawing.num_images, drawing.options["width"]) == (1, 512)
