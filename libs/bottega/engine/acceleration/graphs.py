"""The acceleration by CUDA graphs, so that a fast GPU does not wait for Python to launch kernels.

Frequent shapes are recorded and run as graphs; others run block by block. Hooks of layers cannot be recorded, so
batches with LoRAs that are applied by hooks run block by block too. So does the rest of a forward pass that rows have
left, because its shape has changed. Recordings have a limit of memory: the least recently used one is dropped first.

A recording consists of segments that work on fixed memory. ControlNets' residuals are added to the encoder's outputs
before a decoder block reads them. So the encoder with the middle block is one segment, and so is each decoder block.
Without ControlNets the whole network is one segment.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from bottega.device.memory_plan import MemoryPlan
from bottega.errors import TooLarge
from bottega.model.backbone import Activations, Block, Inputs, RowSpans
from bottega.model.backbones import MadeBackbone
from bottega.model.model import Model
from bottega.model.operations import Operations

_log = logging.getLogger(__name__)

MadeT = TypeVar("MadeT")

# Number of runs before recording: in the first ones, libraries choose algorithms and allocate memory.
_WARM_UP_RUNS = 2
# Name of the reservation, which errors about missing memory mention.
_HOLDER = "graphs"
# Number of plain forward passes of a shape before it is recorded. Recording takes as long as several passes.
_USES = 2
# Number of shapes whose uses are counted; limited, because callers choose the shapes.
_MOST_COUNTED = 256
# Memory for all graphs, as a fraction of the memory for activations that is free at the start.
_SHARE = 4
# Memory for all graphs if the free memory is not known.
_BYTES = 2 << 30

Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shapes of sample and prompt, lengths of padded prompts, data type, and whether residuals are added."""


def key_of(inputs: Inputs) -> Key:
    """Return the key under which the recording for these inputs is stored."""
    sample, prompts = inputs.sample, inputs.prompt_embeds
    return tuple(sample.shape), tuple(prompts.shape), tuple(inputs.prompt_lengths), sample.dtype, inputs.controlled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A recorded sequence of blocks. The last one ends with `Backbone.finish`."""

    first: int
    """Index of its first block; the number of blocks if the segment is only `finish`."""
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

    def __init__(self, inputs: Inputs, segments: Sequence[Segment], output: Tensor, size_bytes: int) -> None:
        self._inputs = inputs
        self.segments = segments
        self.output = output
        """The predicted noise, after the last segment."""
        self.size_bytes = size_bytes
        """Device memory that the recording takes."""

    def fill(self, inputs: Inputs) -> None:
        """Copy the inputs of the next forward pass into the memory that the graphs read."""
        for name in _TENSORS:
            getattr(self._inputs, name).copy_(getattr(inputs, name))
        for name, tensor in self._inputs.added.items():
            tensor.copy_(inputs.added[name])


_TENSORS = ("sample", "timestep", "prompt_embeds")
"""The fields of Inputs that a forward pass reads, besides `added`."""


def record(backbone: MadeBackbone, inputs: Inputs, capture: Capture) -> RecordedForward:
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
    for places in _cut(backbone, whole=not inputs.controlled):

        def run(places: Sequence[int] = places, state: Activations | None = state) -> _Made:
            made = backbone.begin(static) if state is None else _copy(state)
            for place in places:
                if place == len(backbone.blocks):
                    return _Made(activations=made, output=backbone.finish(made))
                backbone.blocks[place].run(made)
            return _Made(activations=made, output=None)

        launch, made = capture.record(run)
        state, output = made.activations, made.output
        segments.append(Segment(first=places[0], launch=launch, after=_copy(state)))
    assert output is not None, "the last segment ends the network"
    return RecordedForward(static, segments, output, size_bytes=max(0, capture.reserved_bytes() - before))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    activations: Activations
    output: Tensor | None


def _copy(state: Activations) -> Activations:
    """Return a copy that shares the tensors. Blocks remove points from its dictionary and replace `hidden`."""
    return replace(state, points=dict(state.points))


def _cut(backbone: MadeBackbone, *, whole: bool) -> list[list[int]]:
    """Return the block indexes of each segment; the number of blocks stands for `finish`.

    A new segment begins where residuals are needed, unless `whole`.
    """
    segments: list[list[int]] = []
    for place, needs in enumerate([*(block.needs for block in backbone.blocks), backbone.finish_needs]):
        if not segments or (needs and not whole):
            segments.append([])
        segments[-1].append(place)
    return segments


class RecordedForwards:
    """The recordings of a backbone.

    Args:
        budget_bytes: Upper bound on their device memory.
        most: Upper bound on their number.
        memory: The plan in which their memory is reserved.
        decoded_area: Returns how many elements of a latent of this area are decoded at once.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        most: int = 16,
        memory: MemoryPlan | None = None,
        decoded_area: Callable[[int], int] = lambda area: area,
    ) -> None:
        self._memory = memory or MemoryPlan()
        self._decoded_area = decoded_area
        self._budget_bytes = budget_bytes
        self._most = most
        self._recorded: OrderedDict[Key, RecordedForward] = OrderedDict()
        self._uses: Counter[Key] = Counter()
        self._refused: set[Key] = set()

    @property
    def used_bytes(self) -> int:
        """Device memory of all recordings."""
        return sum(forward.size_bytes for forward in self._recorded.values())

    def __len__(self) -> int:
        return len(self._recorded)

    def get(self, key: Key, make: Callable[[], RecordedForward]) -> RecordedForward | None:
        """Return the recording for a key, or None if the forward pass must run block by block.

        `make` creates the recording once the key has been used often enough.
        """
        known = self._recorded.get(key)
        if known is not None:
            self._recorded.move_to_end(key)
            return known
        if key in self._refused or not self._often(key):
            return None
        try:
            made = make()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._refuse(key, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None
        if made.size_bytes > self._budget_bytes:
            self._refuse(
                key, f"it needs {made.size_bytes >> 20} MiB; the limit for all graphs is {self._budget_bytes >> 20} MiB"
            )
            return None
        self._recorded[key] = made
        while len(self._recorded) > self._most or self.used_bytes > self._budget_bytes or not self._set_aside(key):
            self._recorded.popitem(last=False)
        if key not in self._recorded:
            self._refuse(key, f"it takes {made.size_bytes >> 20} MiB, and forward passes need the memory that is left")
            return None
        return made

    def clear(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()
        self._memory.release(_HOLDER)
        self._uses.clear()
        self._refused.clear()

    def _set_aside(self, key: Key) -> bool:
        """Reserve memory. Return whether enough is left for forward passes and decodings of this shape."""
        rows, _, height, width = key[0]
        try:
            self._memory.reserve(_HOLDER, self.used_bytes)
        except TooLarge:
            return False
        area = height * width
        return not self._recorded or self._memory.leaves_room(area, rows, decoded_area=self._decoded_area(area))

    def _often(self, key: Key) -> bool:
        if len(self._uses) >= _MOST_COUNTED and key not in self._uses:
            self._uses.clear()
        self._uses[key] += 1
        return self._uses[key] > _USES

    def _refuse(self, key: Key, why: str) -> None:
        if len(self._refused) >= _MOST_COUNTED:
            self._refused.clear()
        self._refused.add(key)
        _log.warning("a shape cannot run as a graph", extra={"shape": str(key[0]), "why": why})


@dataclass(slots=True, kw_only=True)
class GraphedActivations(Activations):
    """Activations of a forward pass that may run as a graph."""

    recorded: RecordedForward | None
    """The graphs that compute the remaining blocks; None if these run block by block."""

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Drop all rows but these; the forward pass has another shape then, and goes on block by block."""
        Activations.select(self, rows, index)
        self.recorded = None


# Fields of the activations of a recording that those of a forward pass share with it.
_KEPT = ("hidden", "embedding", "context", "size", "rotary", "rotations", "mask", "lengths", "sizes")


class GraphedBackbone:
    """A backbone that runs recorded shapes as graphs, and otherwise the blocks of another backbone."""

    def __init__(self, plain: MadeBackbone, recordings: RecordedForwards, capture: Capture) -> None:
        self.spans: RowSpans | None = plain.spans
        self._plain = plain
        self._recordings = recordings
        self._capture = capture
        self._layers = [module for module in plain.network.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        self.finish_needs = plain.finish_needs
        self.blocks: Sequence[Block] = [
            Block(name=block.name, needs=block.needs, run=self._runner(place, block))
            for place, block in enumerate(plain.blocks)
        ]

    def begin(self, inputs: Inputs) -> Activations:
        recorded = None
        # Prompts of different lengths seldom meet again in this order, so a recording would not pay.
        if not self._hooked and len(set(inputs.prompt_lengths)) <= 1:
            make = partial(record, self._plain, inputs, self._capture)
            recorded = self._recordings.get(key_of(inputs), make)
        if recorded is None:
            return self._plain.begin(inputs)
        recorded.fill(inputs)
        after = recorded.segments[0].after
        # Nothing is computed before the first block runs.
        return GraphedActivations(**{name: getattr(after, name) for name in _KEPT}, recorded=recorded)

    def finish(self, activations: Activations) -> Tensor:
        if isinstance(activations, GraphedActivations) and activations.recorded is not None:
            self._launch(len(self.blocks), activations.recorded, activations)
            return activations.recorded.output.clone()  # The next forward pass overwrites it.
        return self._plain.finish(activations)

    @property
    def _hooked(self) -> bool:
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers)

    def _runner(self, place: int, block: Block) -> Callable[[Activations], None]:
        def run(activations: Activations) -> None:
            recorded = activations.recorded if isinstance(activations, GraphedActivations) else None
            if recorded is None:
                block.run(activations)
                return
            self._launch(place, recorded, activations)

        return run

    def _launch(self, place: int, recorded: RecordedForward, activations: Activations) -> None:
        """Run the segment that begins with this block, if there is one.

        Any other block has already run, with the first block of its segment. Afterwards, `activations` are the outputs
        of the segment, to which residuals of ControlNets can be added.
        """
        segment = next((segment for segment in recorded.segments if segment.first == place), None)
        if segment is not None:
            segment.launch()
            after = segment.after
            activations.hidden, activations.embedding = after.hidden, after.embedding
            activations.context, activations.points = after.context, dict(after.points)


class Graphs:
    """Runs forward passes of frequent shapes as CUDA graphs. `capture` creates the recorder for a device."""

    name = "graphs"
    probe = "forward"
    tolerance = 0.01
    """The launches are the same, but libraries may choose other algorithms while they are recorded."""
    excludes: Sequence[str] = ("compile",)

    def __init__(self, capture: Callable[[torch.device], Capture] = CudaCapture) -> None:
        self._capture = capture
        self._operations: Operations | None = None
        self._recordings: RecordedForwards | None = None

    def unsupported(self, model: Model) -> str:
        if self._capture is CudaCapture and model.device.type != "cuda":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        return ""

    def enable(self, model: Model) -> None:
        left = model.memory.left_bytes
        budget_bytes = _BYTES if left is None else left // _SHARE
        recordings = RecordedForwards(budget_bytes=budget_bytes, memory=model.memory, decoded_area=model.decoded_area)
        self._operations, self._recordings = model.operations, recordings
        model.operations.backbone = GraphedBackbone(model.backbone, recordings, self._capture(model.device))

    def disable(self) -> None:
        if self._operations is not None:
            self._operations.backbone = None
        if self._recordings is not None:
            self._recordings.clear()
        self._operations = self._recordings = None
