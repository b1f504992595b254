"""The acceleration by CUDA graphs: a fast GPU no longer waits for Python to launch kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bottega.diffusion.acceleration.graphs.backbone import GraphedBackbone
from bottega.diffusion.acceleration.graphs.capture import Capture, CudaCapture
from bottega.diffusion.acceleration.graphs.store import RecordedForwards
from bottega.diffusion.model.model import Model
from bottega.diffusion.operations import Operations

# The graphs' budget, as a fraction of the memory left for activations when they are tried.
_SHARE = 4
# The budget if the memory left is not known.
_BYTES = 2 << 30


class Graphs:
    """Runs forwards of frequent shapes as CUDA graphs. Tests pass another `capture`."""

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
            return f"it is for CUDA devices, and the model is on {model.device.type}"
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
