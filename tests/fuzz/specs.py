"""The fixed corpus of what a spec says, whoever sends it: every number, name and text at its limits and one past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from bottega.v1.generation_pb2 import PromptSyntax, Sampler, Techniques
from tests.fuzz.case import INF, INVALID, NAN, Case, shown
from tests.fuzz.edits import edit

# Fields that the gateway fills in for the worker.
FILLED: dict[str, Any] = {
    "num_inference_steps": 30,
    "guidance_scale": 4.0,
    "width": 64,
    "height": 64,
    "seed": 1,
    "num_images": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Values of one field that are taken, and that are not."""

    field: str
    good: tuple[Any, ...]
    bad: tuple[Any, ...]


_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
_TAKEN_TEXTS = (
    "",
    "x" * 16_384,
    "é" * 8192,
    "\0",
    "a\u0301" * 99,
    "\u202e\u05d0\u0627",
    "\U0001f469\u200d\U0001f467",
    "\U0010ffff",
)
# Of a spec, whoever sends it.
_RANGES = (
    Bounds(field="num_inference_steps", good=(1, 200), bad=(0, -1, 201, 2**31 - 1, -(2**31))),
    Bounds(field="guidance_scale", good=(0.0, 1.0, 50.0), bad=(-0.001, 50.001, NAN, INF, -INF)),
    Bounds(field="guidance_rescale", good=(0.0, 1.0), bad=(-0.001, 1.001, NAN, INF, -INF)),
    Bounds(field="width", good=(8, 128), bad=(0, -8, 16_385, 2**31 - 1)),
    Bounds(field="height", good=(8, 128), bad=(0, -8, 16_385, 2**31 - 1)),
    Bounds(field="seed", good=(0, 2**53 - 8), bad=(2**53 - 7, 2**64 - 1)),
    Bounds(field="num_images", good=(1, 8), bad=(0, -1, 9, 2**31 - 1)),
    Bounds(field="quality", good=(1, 100), bad=(0, -1, 101)),
    Bounds(field="sampler", good=(0, 1, 2, 3, 4), bad=(19, 99, -1)),
    Bounds(field="prompt_syntax", good=(0, 1, 2), bad=(3, -1)),
    Bounds(field="clip_skip", good=(0, 1), bad=(-1, 101, 2**31 - 1)),
    Bounds(field="fidelity", good=(0, 1, 2, 3), bad=(4, -1)),
    Bounds(field="format", good=(0, 1, 2, 3), bad=(4, -1)),
    *(Bounds(field=name, good=_TAKEN_TEXTS, bad=("x" * 16_385, "é" * 8193, "x" * (1 << 20))) for name in _TEXTS),
)


_OF_SCHEDULES = (
    Bounds(field="timestep_spacing", good=(0, 1, 2, 3), bad=(4, -1)),
    Bounds(field="final_sigmas_type", good=(0, 1, 2), bad=(3, -1)),
    Bounds(
        field="timesteps",
        good=([999, 500, 0], [0]),
        bad=([0, 500], [5, 5], [-1], [100_000], [2**31 - 1, 0], list(range(200, -1, -1))),
    ),
    Bounds(
        field="sigmas",
        good=([14.6, 0.5, 0.0], [1.0, 0.1]),
        bad=([1.0], [1.0, 1.0], [0.0, 1.0], [1.0, -0.1], [INF, 0.0], [NAN, 0.0], [10_001.0, 0.0], [1.0] * 202),
    ),
)
_OF_EDITS = (
    Bounds(field="padding_mask_crop", good=(0, 4096), bad=(-1, 4097, 2**31 - 1, -(2**31))),
    Bounds(field="mask_feather", good=(0, 256), bad=(-1, 257, 2**31 - 1, -(2**31))),
)

# Of thirty steps, as many as FILLED has and as the embedded model makes by default.
PIN = "0123456789abcdef0123456789abcdef@15"
_BAD_PINS = (
    "",
    "x",
    "\0",
    PIN[1:],
    f"0{PIN}",
    PIN.upper(),
    PIN.replace("@15", ""),
    PIN.replace("@15", "@"),
    PIN.replace("@15", "@0"),
    PIN.replace("@15", "@015"),
    PIN.replace("@15", "@-3"),
    PIN.replace("@15", "@1000"),
    f"{PIN}\n",
    "x" * 129,
    "x" * (1 << 20),
)

# With Karras' sigmas, and without; the embedded model's own is of the first kind.
_KARRAS = (Sampler.SAMPLER_UNSPECIFIED, Sampler.SAMPLER_EULER, Sampler.SAMPLER_DPMPP_2M)
_NO_KARRAS = (Sampler.SAMPLER_EULER_ANCESTRAL, Sampler.SAMPLER_DDIM)


def spec_ranges(case: Any) -> Iterator[Case]:
    """Of callers, and of the gateway to a worker. case: makes one."""
    for bounds in (*_RANGES, *_OF_EDITS):
        rest = edit() if bounds in _OF_EDITS else {}
        for good in bounds.good:
            yield case(f"{bounds.field} {shown(good)}", **{**rest, bounds.field: good})
        for bad in bounds.bad:
            yield case(f"{bounds.field} {shown(bad)}", INVALID, f"spec.{bounds.field}", **{**rest, bounds.field: bad})
    for number in range(4):
        yield case(f"format {number} without metadata", format=number, metadata=False)
    yield from _several_prompts(case)
    yield from _weighted_prompts(case)
    for sampler in _KARRAS:
        yield case(f"Karras' sigmas with sampler {sampler}", sampler=sampler, use_karras_sigmas=True)
    for sampler in _NO_KARRAS:
        field = "spec.use_karras_sigmas"
        yield case(f"Karras' sigmas with sampler {sampler}", INVALID, field, sampler=sampler, use_karras_sigmas=True)
    for sampler in (*_KARRAS, *_NO_KARRAS):
        yield case(f"no Karras' sigmas with sampler {sampler}", sampler=sampler, use_karras_sigmas=False)
    yield case("Karras' sigmas with none", INVALID, "spec.sampler", sampler=99, use_karras_sigmas=True)
    yield from _schedules(case)
    for entry in _BAD_PINS:
        named = Techniques(cache_entry=entry)
        yield case(f"cache entry {shown(entry)}", INVALID, "spec.techniques.cache_entry", techniques=named)


def _schedules(case: Any) -> Iterator[Case]:
    euler = partial(case, sampler=Sampler.SAMPLER_EULER, use_karras_sigmas=False)
    for bounds in _OF_SCHEDULES:
        for good in bounds.good:
            yield euler(f"{bounds.field} {shown(good)}", **{bounds.field: good, **_steps_of(bounds.field, good)})
        for bad in bounds.bad:
            values = {bounds.field: bad, **_steps_of(bounds.field, bad)}
            yield euler(f"{bounds.field} {shown(bad)}", INVALID, f"spec.{bounds.field}", **values)
    for name in ("use_exponential_sigmas", "use_beta_sigmas"):
        yield euler(f"{name} with Euler", **{name: True})
        yield case(f"{name} with DDIM", INVALID, f"spec.{name}", sampler=Sampler.SAMPLER_DDIM, **{name: True})
    both = {"use_exponential_sigmas": True, "use_beta_sigmas": True}
    yield euler("two kinds of sigmas", INVALID, "spec.use_beta_sigmas", **both)
    four = {"timesteps": [9, 5, 1], "num_inference_steps": 4}
    yield euler("3 timesteps of 4 steps", INVALID, "spec.num_inference_steps", **four)


def _steps_of(field: str, value: Any) -> dict[str, int]:
    """The steps of a list, which a gateway fills in."""
    made = {"timesteps": 0, "sigmas": -1}
    return {"num_inference_steps": min(max(len(value) + made[field], 1), 200)} if field in made else {}


def _weighted_prompts(case: Any) -> Iterator[Case]:
    weighted = partial(case, prompt_syntax=PromptSyntax.PROMPT_SYNTAX_WEIGHTED)
    for good in ("(a:1.5) [star] BREAK \\(b\\)", "((a", "a))]", ":1.2)", "", "(a:-3)", "a (star, " * 12):
        yield weighted(f"weighted prompt {shown(good)}", prompt=good)
    for bad in ("(a:1.2.3)", "(a:101)", "(" * 1000, "a BREAK " * 30, "[a:b:0.5]", "[a|b]", "a AND b", "<lora:a:1>"):
        yield weighted(f"weighted prompt {shown(bad)}", INVALID, "spec.prompt", prompt=bad)
        yield weighted(f"weighted {shown(bad)}", INVALID, "spec.negative_prompt", negative_prompt=bad)
    full = {"prompt": "a", "num_images": 1, "negative_prompt": "[]" * 2048}
    yield weighted("as many marks as weighted texts may have", **full, negative_prompt_2="()" * 2048)
    yield weighted("one more mark", INVALID, "spec.prompt_syntax", **full, negative_prompt_2="()" * 2048 + ":")


def _several_prompts(case: Any) -> Iterator[Case]:
    star = partial(case, prompt="a star")
    for count in (1, 2, 8):
        yield star(f"{count} prompts", prompts=["a star", *["a ring"] * (count - 1)], num_images=count)
    yield star("9 prompts", INVALID, "spec.prompts", prompts=["a star"] * 9, num_images=8)
    yield star("a long prompt of two", INVALID, "spec.prompts[1]", prompts=["a star", "x" * 16_385], num_images=2)
    yield star("prompts beside another prompt", INVALID, "spec.prompt", prompts=["a ring"] * 2, num_images=2)
    yield star("3 images of 2 prompts", INVALID, "spec.num_images", prompts=["a star"] * 2, num_images=3)
    two: dict[str, Any] = {"prompts": ["a star", "a ring"], "num_images": 2}
    yield star("two prompts to keep", INVALID, "spec.prompts", **two, keep_for_editing=True)
    yield star("two prompts of an edit", INVALID, "spec.prompts", **edit(), **two)
