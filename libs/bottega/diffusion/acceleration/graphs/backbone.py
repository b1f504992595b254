"""The denoising network by recorded forwards where there is one of the shape, and block by block where there is none.

Rows whose LoRAs go beside the weights run block by block: their products are hooks of layers, which a recording does
not have. So do the blocks that are left when rows leave a forward, because of its residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from bottega.diffusion.acceleration.graphs.capture import Capture
from bottega.diffusion.acceleration.graphs.recorded import RecordedForward, Segment, key_of, record
from bottega.diffusion.acceleration.graphs.store import RecordedForwards
from bottega.diffusion.model.backbone import Activations, Block, Inputs, UNetBackbone


@dataclass(slots=True, kw_only=True)
class GraphedActivations(Activations):
    """recorded: what computes the rest; None once that is done block by block."""

    recorded: RecordedForward | None

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keeps only these rows; what is left of the forward has another shape, and runs block by block."""
        Activations.select(self, rows, index)
        self.recorded = None


class GraphedBackbone:
    """A Backbone with the blocks of another one."""

    def __init__(self, plain: UNetBackbone, recordings: RecordedForwards, capture: Capture) -> None:
        self._plain = plain
        self._recordings = recordings
        self._capture = capture
        self._layers = [each for each in plain.unet.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
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
        # Nothing of it is computed before the first block is run.
        return GraphedActivations(
            hidden=after.hidden, embedding=after.embedding, context=after.context, recorded=recorded
        )

    def finish(self, activations: Activations) -> Tensor:
        if isinstance(activations, GraphedActivations) and activations.recorded is not None:
            return activations.recorded.output.clone()  # the next forward writes to the same place
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
    """The segment whose first block that is; None for a block in the middle of one, which has run with that."""
    first = 0
    for segment in segments:
        if first == place:
            return segment
        first = segment.last + 1
    return None


def _leave(segment: Segment, activations: Activations) -> None:
    """What the blocks of a segment would have left: residuals are added to these tensors, which the next one reads."""
    after = segment.after
    activations.hidden, activations.embedding, activations.context = after.hidden, after.embedding, after.context
    activations.points = dict(after.points)
