"""The network recorded for one shape of inputs, in segments that work on fixed memory.

ControlNets' residuals are added to the encoder's outputs before a decoder block reads them. So the encoder with the
middle block is one segment, and so is each decoder block. Without ControlNets the whole network is one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bottega.model.backbone import Activations, Block, Inputs, UNetBackbone

MadeT = TypeVar("MadeT")

# Number of runs before recording: in the first ones, libraries choose algorithms and allocate memory.
_WARM_UP_RUNS = 2

Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shapes of sample and prompt, data type, and whether residuals are added."""


def key_of(inputs: Inputs) -> Key:
    """Return the key under which the recording for these inputs is stored."""
    return tuple(inputs.sample.shape), tuple(inputs.prompt_embeds.shape), inputs.sample.dtype, inputs.controlled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A recorded sequence of blocks."""

    last: int
    """Index of its last block."""
    launch: Callable[[], None]
    """Runs the segment again."""
    after: Activations
    """The activations after the segment."""


class Capture(Protocol):
    """Records functions on one device. Not thread-safe."""

    def begin(self) -> None:
        """Begin a new set of recordings, whose memory is freed together.

        Return unused memory to the device, as recording does, so that the difference of `reserved_bytes` before and
        after is the memory that the set takes.
        """
        ...

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        """Run a function. Return a function that replays its kernel launches, and its result.

        The inputs must stay at their addresses. Each replay overwrites the result. Raise the function's errors, or
        RuntimeError if the launches cannot be recorded.
        """
        ...

    def reserved_bytes(self) -> int:
        """Return the device memory reserved by this process."""
        ...


class CudaCapture:
    """Records with torch.cuda.CUDAGraph. The graphs of a set share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def begin(self) -> None:
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Record only this thread: others, which receive from links, may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            made = function()
        graph.replay()
        return graph.replay, made

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))


class RecordedForward:
    """The graphs of one shape. Each forward pass overwrites their tensors."""

    def __init__(self, inputs: Inputs, segments: Sequence[Segment], output: Tensor) -> None:
        self._inputs = inputs
        self.segments = segments
        self.output = output
        """The predicted noise, after the last segment."""
        self.size_bytes = 0
        """Device memory that the recording takes."""

    def fill(self, inputs: Inputs) -> None:
        """Copy the inputs of the next forward pass into the memory that the graphs read."""
        for name in _TENSORS:
            getattr(self._inputs, name).copy_(getattr(inputs, name))
        for name, tensor in self._inputs.added.items():
            tensor.copy_(inputs.added[name])


_TENSORS = ("sample", "timestep", "prompt_embeds")
"""The fields of Inputs that a forward pass reads, besides `added`."""


def record(backbone: UNetBackbone, inputs: Inputs, capture: Capture) -> RecordedForward:
    """Record a forward pass of this shape. Raise the errors of the network or the device."""
    capture.begin()
    before = capture.reserved_bytes()
    static = replace(
        inputs,
        **{name: getattr(inputs, name).clone() for name in _TENSORS},
        added={name: tensor.clone() for name, tensor in inputs.added.items()},
        activations=(),
        origins=(),
    )
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
    """Return a copy that shares the tensors. Blocks remove points from its dictionary and replace `hidden`."""
    return replace(state, points=dict(state.points))


def _cut(blocks: Sequence[Block], *, whole: bool) -> list[list[int]]:
    """Return the block indexes of each segment. A new segment begins where residuals are needed, unless `whole`."""
    if whole:
        return [list(range(len(blocks)))]
    segments: list[list[int]] = []
    for place, block in enumerate(blocks):
        if block.needs or not segments:
            segments.append([])
        segments[-1].append(place)
    return segments
