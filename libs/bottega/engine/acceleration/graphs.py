"""The acceleration by CUDA graphs, so that a fast GPU does not wait for Python to launch kernels.

Frequent shapes are recorded and run as graphs; others run block by block. Hooks of layers cannot be recorded, so
batches with LoRAs that are applied by hooks run block by block too. So does the rest of a forward pass that rows have
left, because its shape has changed. Recordings are kept within a limit of memory, and the least recently used one is
dropped first.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bottega.device.memory_plan import MemoryPlan
from bottega.engine.acceleration.recorded_graphs import (
    Capture,
    CudaCapture,
    Key,
    RecordedForward,
    Segment,
    key_of,
    record,
)
from bottega.errors import TooLarge
from bottega.model.backbone import Activations, Block, Inputs, RowSpans, UNetBackbone
from bottega.model.model import Model
from bottega.model.operations import Operations

_log = logging.getLogger(__name__)

# Name of the reservation, which errors about missing memory mention.
_HOLDER = "graphs"
# Number of plain forward passes of a shape before it is recorded. Recording takes as long as several passes.
_USES = 2
# Number of shapes whose uses are counted; limited, because callers choose the shapes.
_MOST_COUNTED = 256


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


class GraphedBackbone:
    """A backbone that runs recorded shapes as graphs, and otherwise the blocks of another backbone."""

    spans: RowSpans | None = None

    def __init__(self, plain: UNetBackbone, recordings: RecordedForwards, capture: Capture) -> None:
        self._plain = plain
        self._recordings = recordings
        self._capture = capture
        self._layers = [module for module in plain.unet.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        self.blocks: Sequence[Block] = [
            Block(name=block.name, needs=block.needs, run=self._runner(place, block))
            for place, block in enumerate(plain.blocks)
        ]

    def begin(self, inputs: Inputs) -> Activations:
        recorded = None if self._hooked else self._recordings.get(key_of(inputs), lambda: self._record(inputs))
        if recorded is None:
            return self._plain.begin(inputs)
        recorded.fill(inputs)
        after = recorded.segments[0].after
        # Nothing is computed before the first block runs.
        return GraphedActivations(
            hidden=after.hidden, embedding=after.embedding, context=after.context, recorded=recorded
        )

    def finish(self, activations: Activations) -> Tensor:
        if isinstance(activations, GraphedActivations) and activations.recorded is not None:
            return activations.recorded.output.clone()  # The next forward pass overwrites it.
        return self._plain.finish(activations)

    @property
    def _hooked(self) -> bool:
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers)

    def _record(self, inputs: Inputs) -> RecordedForward:
        return record(self._plain, inputs, self._capture)

    def _runner(self, place: int, block: Block) -> Callable[[Activations], None]:
        def run(activations: Activations) -> None:
            recorded = activations.recorded if isinstance(activations, GraphedActivations) else None
            if recorded is None:
                block.run(activations)
                return
            segment = _beginning_at(recorded.segments, place)
            if segment is not None:
                segment.launch()
                _leave(segment, activations)

        return run


def _beginning_at(segments: Sequence[Segment], place: int) -> Segment | None:
    """Return the segment that begins with this block; None inside of a segment, which has run it already."""
    first = 0
    for segment in segments:
        if first == place:
            return segment
        first = segment.last + 1
    return None


def _leave(segment: Segment, activations: Activations) -> None:
    """Set the activations to those after a segment, to which ControlNets' residuals are added."""
    after = segment.after
    activations.hidden, activations.embedding, activations.context = after.hidden, after.embedding, after.context
    activations.points = dict(after.points)


# Memory for all graphs, as a fraction of the memory for activations that is free at the start.
_SHARE = 4
# Memory for all graphs if the free memory is not known.
_BYTES = 2 << 30


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
