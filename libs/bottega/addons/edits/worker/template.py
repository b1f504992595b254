"""Checks a store's response about a template: its sections, without their content."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bottega import rules
from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, StepKey
from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.model.rows import Half
from bottega.v1.activations_pb2 import BlockProfile, SectionInfo, SectionKey, TemplateAnswer
from bottega.v1.trace_pb2 import StoreTimes

MAX_SECTIONS = 4096
"""Maximum number of sections of a template: 1,000 steps, both halves of guidance, with and without a ControlNet."""

_MAX_SIDE = 1024
"""Maximum side of a latent, in elements, for which a map can be sent."""

_RECORDING = re.compile("[0-9a-f]{32}")
_DIGEST = re.compile("[0-9a-f]{64}")
_PROMPT = re.compile("([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnsweredSection:
    """A forward pass whose outputs the store has."""

    key: StepKey
    digest: str
    """SHA-256 of the section's bytes, hex."""
    layout: SectionLayout
    valid: Tensor
    """Elements whose outputs may be reused, bool [height, width] of the latent."""
    prompt: str
    in_memory: bool = False
    """Whether the store has the section in memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnsweredTemplate:
    """A store's response about a template: its recording, or whether this worker may record it."""

    recording: str
    """ID of the recording; empty if the store has none."""
    shape: tuple[int, int] = (0, 0)
    """Height and width of the latent."""
    sections: tuple[AnsweredSection, ...] = ()
    drawn: DrawnTemplate | None = None
    record: bool = False
    """Whether this worker may record the template."""
    budget_bytes: int = 0
    """Maximum bytes of one recording; 0 for no limit."""
    profile: BlockProfile | None = None
    """Measured times of the model's blocks; None if the store has none."""
    times: StoreTimes = field(default_factory=StoreTimes)
    """Time that the store has spent on the query."""


def read_template(answer: TemplateAnswer, drawn: DrawnTensors | None) -> AnsweredTemplate:
    """Return a checked response. Raise ValueError for impossible content."""
    profile = _profile(answer)
    budget_bytes = max(0, answer.template_budget_bytes)
    if not answer.recording:
        return AnsweredTemplate(
            recording="", record=answer.record, budget_bytes=budget_bytes, profile=profile, times=answer.times
        )
    _check(_RECORDING.fullmatch(answer.recording) is not None, "a recording has an id of 32 hex digits")
    shape = answer.latent_height, answer.latent_width
    _check(all(1 <= side <= _MAX_SIDE for side in shape), f"a latent has 1 to {_MAX_SIDE} elements a side")
    _check(1 <= len(answer.sections) <= MAX_SECTIONS, f"a template has 1 to {MAX_SECTIONS} sections")
    layouts = [SectionLayout.from_wire(layout) for layout in answer.layouts]
    maps = [unpack_map(packed, shape) for packed in answer.maps]
    sections = tuple(_section(info, layouts, maps) for info in answer.sections)
    _check(len({section.key for section in sections}) == len(sections), "a template has two sections of one forward")
    return AnsweredTemplate(
        recording=answer.recording,
        shape=shape,
        sections=sections,
        drawn=_drawn(drawn, shape, answer.seed),
        budget_bytes=budget_bytes,
        profile=profile,
        times=answer.times,
    )


def pack_map(valid: Tensor) -> bytes:
    """Convert a map, bool [height, width], to bytes for a message."""
    return np.packbits(valid.numpy()).tobytes()


def unpack_map(packed: bytes, shape: tuple[int, int]) -> Tensor:
    """Convert bytes to a map, bool [height, width]. Raise ValueError if the number of bits is wrong."""
    count = math.prod(shape)
    _check(len(packed) == -(-count // 8), "a map has a bit for each element of the latent")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count)
    return torch.from_numpy(bits.reshape(shape).astype(bool))


def section_key(key: StepKey) -> SectionKey:
    """Convert a key to a message."""
    return SectionKey(timestep=key.timestep, noise_level=key.noise_level, half=key.half.value, controls=key.controls)


def _section(info: SectionInfo, layouts: Sequence[SectionLayout], maps: Sequence[Tensor]) -> AnsweredSection:
    key = info.key
    _check(0 <= info.layout < len(layouts), "a section has a layout that the answer lacks")
    _check(0 <= info.map < len(maps), "a section has a map that the answer lacks")
    _check(math.isfinite(key.timestep), "the timestep of a section is not finite")
    _check(0.0 < key.noise_level < math.inf, "a section has no noise level above 0")
    _check(0 <= key.half < len(Half), "a section has an unknown half of guidance")
    _check(len(key.controls) <= rules.MAX_ADAPTERS, "a section has more ControlNets than a request may")
    _check(_DIGEST.fullmatch(info.digest) is not None, "a section has a digest of 64 hex digits")
    _check(_PROMPT.fullmatch(info.prompt) is not None, "a section has a prompt's digest of 64 hex digits, or none")
    return AnsweredSection(
        key=StepKey(
            timestep=key.timestep,
            noise_level=key.noise_level,
            half=Half(key.half),
            controls=tuple(key.controls),
        ),
        digest=info.digest,
        layout=layouts[info.layout],
        valid=maps[info.map],
        prompt=info.prompt,
        in_memory=info.in_memory,
    )


def _drawn(drawn: DrawnTensors | None, shape: tuple[int, int], seed: int) -> DrawnTemplate | None:
    """Return tensors in the bytes of the message, which are copies that belong to it."""
    if drawn is None:
        return None
    _check(tuple(drawn.shape[2:]) == shape, "image latent and noise have another size than the latent")
    _check(seed <= rules.MAX_SEED + rules.MAX_IMAGES, "image latent and noise have a seed above the largest one")
    image_latent, noise = (
        torch.from_numpy(np.frombuffer(data, np.float32).reshape(drawn.shape).copy())
        for data in (drawn.image_latent, drawn.noise)
    )
    finite = bool(torch.isfinite(image_latent).all()) and bool(torch.isfinite(noise).all())
    _check(finite, "image latent or noise of a template has values that are not finite")
    return DrawnTemplate(image_latent=image_latent, noise=noise, seed=seed)


def _profile(answer: TemplateAnswer) -> BlockProfile | None:
    """Return a checked profile. An invalid one could cause divisions by zero, or very long waits."""
    if not answer.HasField("profile"):
        return None
    profile = answer.profile
    shares = (0.0, *profile.shares)
    # Written so that NaN breaks the rules.
    ascending = all(before < share <= 1.0 for before, share in pairwise(shares))
    _check(ascending, "the shares of a profile are ascending, above 0 and at most 1")
    alike = all(len(block.masked_s) == len(profile.shares) for block in profile.blocks)
    _check(alike, "a block of a profile has another number of shares than the profile")
    seconds = [second for block in profile.blocks for second in (block.full_s, *block.masked_s)]
    possible = all(math.isfinite(second) and second >= 0.0 for second in (profile.forward_s, *seconds))
    _check(possible, "a profile has seconds that are negative or not finite")
    return profile


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
