"""The fixed corpus of what a spec says, whoever sends it: every number, name and text at its limits and one past."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bottega.v1.generation_pb2 import PromptSyntax, Sampler, Techniques
from tests.fuzz.case import INF, INVALID, LEAST_INT32, MIB_TEXT, MOST_INT32, NAN, Case, limits, shown
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


# Values of a field that are taken, and that are not, by its name.
Bounds = Mapping[str, tuple[Sequence[Any], Sequence[Any]]]

_OTHER_TEXTS = ("prompt_2", "negative_prompt", "negative_prompt_2")
_LONG_TEXTS = ("x" * 16_385, "é" * 8193, MIB_TEXT)
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
_RANGES: Bounds = {
    "num_inference_steps": ((1, 200), (0, -1, 201, MOST_INT32, LEAST_INT32)),
    "guidance_scale": ((0.0, 1.0, 50.0), (-0.001, 50.001, NAN, INF, -INF)),
    "guidance_rescale": ((0.0, 1.0), (-0.001, 1.001, NAN, INF, -INF)),
    # Above 1 only some models take it.
    "true_cfg_scale": ((0.0, 1.0), (-0.001, 50.001, NAN, INF, -INF)),
    "cfg_normalization": ((0.0,), (-0.001, 50.001, NAN, INF, -INF)),
    "cfg_truncation": ((1.0,), (-0.001, 1.001, NAN, INF, -INF)),
    **dict.fromkeys(("width", "height"), ((8, 128), (0, -8, 16_385, MOST_INT32))),
    "seed": ((0, 2**53 - 8), (2**53 - 7, 2**64 - 1)),
    "num_images": ((1, 8), (0, -1, 9, MOST_INT32)),
    "quality": ((1, 100), (0, -1, 101)),
    "sampler": ((0, 1, 2, 3, 4), (20, 99, -1)),
    "prompt_syntax": ((0, 1, 2), (3, -1)),
    "clip_skip": ((0, 1), (-1, 101, MOST_INT32)),
    "max_sequence_length": ((), (-1, 0, 513, MOST_INT32)),
    **dict.fromkeys(("fidelity", "format"), ((0, 1, 2, 3), (4, -1))),
    "prompt": (_TAKEN_TEXTS, _LONG_TEXTS),
    **dict.fromkeys(_OTHER_TEXTS, (_TAKEN_TEXTS[:3], _LONG_TEXTS)),
}
_OF_SCHEDULES: Bounds = {
    "timestep_spacing": ((0, 1, 2, 3), (4, -1)),
    "final_sigmas_type": ((0, 1, 2), (3, -1)),
    "timesteps": (
        ([999, 500, 0], [0]),
        ([0, 500], [5, 5], [-1], [100_000], [MOST_INT32, 0], list(range(200, -1, -1))),
    ),
    "sigmas": (
        ([14.6, 0.5, 0.0], [1.0, 0.1]),
        ([1.0], [1.0, 1.0], [0.0, 1.0], [1.0, -0.1], [INF, 0.0], [NAN, 0.0], [10_001.0, 0.0], [1.0] * 202),
    ),
}
_OF_EDITS: Bounds = {
    "padding_mask_crop": ((0, 4096), (-1, 4097, MOST_INT32, LEAST_INT32)),
    "mask_feather": ((0, 256), (-1, 257, MOST_INT32, LEAST_INT32)),
}

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
    MIB_TEXT,
)

# With Karras' sigmas, and without; the embedded model's own is of the first kind.
_KARRAS = (Sampler.SAMPLER_UNSPECIFIED, Sampler.SAMPLER_EULER, Sampler.SAMPLER_DPMPP_2M)
_NO_KARRAS = (Sampler.SAMPLER_EULER_ANCESTRAL, Sampler.SAMPLER_DDIM)


def spec_ranges(case: Any) -> Iterator[Case]:
    """Of callers, and of the gateway to a worker. case: makes one."""
    for field, (good, bad) in _RANGES.items():
        yield from limits(case, field, good, bad, within="spec.")
    for field, (good, bad) in _OF_EDITS.items():
        yield from limits(case, field, good, bad, within="spec.", **edit())
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
    for field, (good, bad) in _OF_SCHEDULES.items():
        for values in (good, bad):
            for value in values:
                named = () if values is good else (INVALID, f"spec.{field}")
                yield euler(f"{field} {shown(value)}", *named, **{field: value, **_steps_of(field, value)})
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
