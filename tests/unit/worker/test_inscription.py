"""The text of a picture that other tools read, by the rules of AUTOMATIC1111's `parse_generation_parameters`."""

from __future__ import annotations

import json
import re

import pytest

from bottega.v1.generation_pb2 import GenerationSpec, Sampler
from bottega.worker.image_codec import inscription, summary

# As AUTOMATIC1111's web UI has it (modules/infotext_utils.py).
_SETTING = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


def read(text: str) -> dict[str, str]:
    """Read a text as that web UI does."""
    *lines, last = text.strip().split("\n")
    if len(_SETTING.findall(last)) < 3:
        lines.append(last)
        last = ""
    found = {"Prompt": "", "Negative prompt": ""}
    part = "Prompt"
    for line in lines:
        if line.startswith("Negative prompt:"):
            part, line = "Negative prompt", line.removeprefix("Negative prompt:")  # noqa: PLW2901
        found[part] = f"{found[part]}\n{line.strip()}".strip()
    for name, value in _SETTING.findall(last):
        found[name] = json.loads(value) if value.startswith('"') else value
    return found


def spec() -> GenerationSpec:
    made = GenerationSpec(prompt="a star, red", num_inference_steps=20, seed=7, width=64, height=48, model="shapes")
    made.guidance_scale = 4.5
    return made


def test_other_tools_read_prompt_negative_prompt_and_settings() -> None:
    drawn = spec()
    drawn.negative_prompt = "blue, green"
    drawn.sampler, drawn.use_karras_sigmas, drawn.strength = Sampler.SAMPLER_DPMPP_2M, True, 0.6
    drawn.loras.add(name="ink", scale=0.5, digest="5a" * 32)
    drawn.loras.add(name="dots", digest="6b" * 32)
    drawn.loras.add(name="toy", digest="7c" * 32, token="<toy>")
    drawn.loras.add(name="ugly@shop", digest="8d" * 32, token="ugly")
    text = summary(drawn, "0123456789abcdef")
    assert len(text.split("\n")) == 3
    assert read(text) == {
        "Prompt": "a star, red <lora:ink:0.5> <lora:dots:1>",
        "Negative prompt": "blue, green",
        "Steps": "20",
        "Sampler": "DPM++ 2M",
        "Schedule type": "Karras",
        "CFG scale": "4.5",
        "Seed": "7",
        "Size": "64x48",
        "Model hash": "0123456789",
        "Model": "shapes",
        "Denoising strength": "0.6",
        "Lora hashes": "ink: 5a5a5a5a5a5a, dots: 6b6b6b6b6b6b",
        "TI hashes": "<toy>: 7c7c7c7c7c7c, ugly: 8d8d8d8d8d8d",
    }


def test_other_tools_tell_an_embedded_guidance_from_a_classifier_free_one() -> None:
    drawn = spec()
    drawn.true_cfg_scale = 1
    assert {name: value for name, value in read(summary(drawn, "")).items() if "cale" in name} == {
        "CFG scale": "1",
        "Distilled CFG Scale": "4.5",
    }


def test_other_tools_count_guidance_from_1() -> None:
    drawn = spec()
    drawn.cfg_truncation = 1
    assert read(summary(drawn, ""))["CFG scale"] == "5.5"


@pytest.mark.parametrize(
    ("field", "title"),
    [("use_karras_sigmas", "Karras"), ("use_exponential_sigmas", "Exponential"), ("use_beta_sigmas", "Beta")],
)
def test_other_tools_read_the_kind_of_sigmas_as_the_schedule_type(field: str, title: str) -> None:
    drawn = spec()
    setattr(drawn, field, True)
    assert read(summary(drawn, ""))["Schedule type"] == title
    setattr(drawn, field, False)
    assert "Schedule type" not in read(summary(drawn, ""))


def test_every_sampler_has_a_name_that_other_tools_know() -> None:
    for number in set(Sampler.values()) - {Sampler.SAMPLER_UNSPECIFIED}:
        drawn = spec()
        drawn.sampler = number
        assert read(summary(drawn, ""))["Sampler"]


@pytest.mark.parametrize("prompt", ["a star\nNegative prompt: a moon", "a star\r\nSteps: 1, Seed: 2, Size: 3x3", ""])
def test_no_line_of_a_prompt_passes_for_another(prompt: str) -> None:
    drawn = spec()
    drawn.prompt = drawn.negative_prompt = prompt
    found = read(summary(drawn, ""))
    assert found["Prompt"] == found["Negative prompt"] == " ".join(prompt.split())
    assert (found["Steps"], found["Seed"], found["Size"]) == ("20", "7", "64x48")


def test_the_text_of_one_of_several_prompts_draws_it_alone() -> None:
    drawn = spec()
    drawn.prompts[:], drawn.num_images = ["a star, red", "a ring"], 2
    texts = inscription(drawn, 1, "0123456789abcdef")
    assert json.loads(texts["bottega"]) | {"prompt": "a ring", "num_images": 1, "seed": "8"} == json.loads(
        texts["bottega"]
    )
    assert "prompts" not in json.loads(texts["bottega"])
    assert read(texts["parameters"])["Prompt"] == "a ring"
