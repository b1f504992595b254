"""The network for one shape, recorded in the segments that ControlNets dictate, over memory that stays where it is.

Residuals are added to what the encoder has put out before a decoder block reads it: so the encoder with the middle
block is one segment, and each decoder block is one. Where no row has a ControlNet all of it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.diffusion.acceleration.graphs.capture import Capture
from bottega.diffusion.model.backbone import Activations, Block, Inputs, UNetBackbone

Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shapes of sample and prompt, element type, and whether residuals come."""


def key_of(inputs: Inputs) -> Key:
    """What a recording is for."""
    return tuple(inputs.sample.shape), tuple(inputs.prompt_embeds.shape), inputs.sample.dtype, inputs.controlled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """blocks: the last one's place, after which it is over. launch: runs it. after: what it leaves behind."""

    last: int
    launch: Callable[[], None]
    after: Activations


class RecordedForward:
    """One shape. Its tensors are overwritten by every forward: what is to stay is copied.

    output: the prediction, after the last segment. size_bytes: of the device's memory.
    """

    def __init__(self, inputs: Inputs, segments: Sequence[Segment], output: Tensor) -> None:
        self._inputs = inputs
        self.segments = segments
        self.output = output
        self.size_bytes = 0

    def fill(self, inputs: Inputs) -> None:
        """Takes in what the next launch is to read."""
        for name in _TENSORS:
            getattr(self._inputs, name).copy_(getattr(inputs, name))


_TENSORS = ("sample", "timestep", "prompt_embeds", "pooled_embeds", "time_ids")
"""Of Inputs: what a forward reads."""


def record(backbone: UNetBackbone, inputs: Inputs, capture: Capture) -> RecordedForward:
    """Records a forward of this shape. Raises what the network or the device raises."""
    capture.begin()
    before = capture.reserved_bytes()
    static = replace(inputs, **{name: getattr(inputs, name).clone() for name in _TENSORS}, activations=(), origins=())
    segments: list[Segment] = []
    output: Tensor | None = None
    state: Activations | None = None
    for blocks in _cut(backbone.blocks, whole=not inputs.controlled):
        ends = blocks[-1] == len(backbone.blocks) - 1

        def run(blocks: Sequence[int] = blocks, state: Activations | None = state, ends: bool = ends) -> _Made:
            made = backbone.begin(static) if state is None else _copy(state)
            for place in blocks:
                backbone.blocks[place].run(made)
            return _Made(activations=made, output=backbone.finish(made) if ends else None)

        launch, made = capture.record(run)
        state, output = made.activations, made.output
        segments.append(Segment(last=blocks[-1], launch=launch, after=_copy(state)))
    assert output is not None, "the last segment ends the network"
    recorded = RecordedForward(static, segments, output)
    recorded.size_bytes = max(0, capture.reserved_bytes() - before)
    return recorded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    activations: Activations
    output: Tensor | None


def _copy(state: Activations) -> Activations:
    """The same tensors: blocks take points out of the dictionary, and put others in the place of `hidden`."""
    return replace(state, points=dict(state.points))


def _cut(blocks: Sequence[Block], *, whole: bool) -> list[list[int]]:
    """The places of each segment's blocks: one begins where residuals are needed."""
    if whole:
        return [list(range(len(blocks)))]
    segments: list[list[int]] = []
    for place, block in enumerate(blocks):
        if block.needs or not segments:
            segments.append([])
        segments[-1].append(place)
    return segments
