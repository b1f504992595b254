"""The recorded outputs of one forward pass, in this process or still being loaded from a store.

Masked blocks attend to all tokens. For tokens that are not computed, keys and values are projected from the recorded
output of the block before, again in every edit. Caching them saves a third of a masked block's time on a CPU and takes
four times the bytes of the recorded outputs (two tensors in the model's dtype).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.addons.edits.engine.activations import Projections
from bottega.engine.spans import StoreWork


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTime:
    """When a load began, how long it took, how large it was, and why."""

    began_s: float
    """Time of the request, on CLOCK_MONOTONIC."""
    seconds: float
    size_bytes: int
    work: StoreWork | None = None
    """Time that the store spent on the load; None if unknown."""


class RecordedStep(Protocol):
    """The outputs of one forward pass by name, float16 on the CPU; see `StepActivations`. Not thread-safe."""

    valid: Tensor
    """Elements whose outputs may be reused, bool [height, width] of the latent; see `Recording`."""
    prompt: str
    """Digest of the prompt, see `prompt_of`; empty if parts were computed with different prompts."""

    @property
    def names(self) -> Collection[str]:
        """Names of all recorded outputs, in order of execution."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all recorded outputs, in this process or in a store."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes in this process's memory, without memory that is shared with a store."""
        ...

    @property
    def writable(self) -> bool:
        """Whether the tensors may be written to."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether the store's memory is mapped into this process, so that requested tensors need no transfer."""
        ...

    def bytes_of(self, name: str) -> int:
        """Return the bytes of an output, in this process or in a store; 0 for an unknown name."""
        ...

    def get(self, name: str) -> Tensor | None:
        """Return an output that is in this process, or None. It must not be written to unless the step is writable."""
        ...

    def request(self, names: Sequence[str]) -> None:
        """Load these outputs in this order, after earlier requests. Skip outputs that are loaded or requested."""
        ...

    def wait(self, name: str, timeout_s: float) -> bool:
        """Wait for a requested output, and return whether it arrived. Return at once if it will not arrive."""
        ...

    def drop_requests(self) -> None:
        """Cancel the pending requests. Later calls do nothing."""
        ...

    def take_load_times(self) -> Sequence[LoadTime]:
        """Return the loads that ended since the last call, including those that others requested."""
        ...


class MemoryStep:
    """A forward pass whose outputs are all in this process."""

    writable = True
    mapped = False

    def __init__(self, *, valid: Tensor, outputs: Mapping[str, Tensor], prompt: str = "") -> None:
        self.valid = valid
        self.prompt = prompt
        self.outputs = dict(outputs)
        self.size_bytes = sum(tensor.nbytes for tensor in self.outputs.values())

    @property
    def names(self) -> Collection[str]:
        return self.outputs.keys()

    @property
    def held_bytes(self) -> int:
        return self.size_bytes

    def bytes_of(self, name: str) -> int:
        output = self.outputs.get(name)
        return 0 if output is None else output.nbytes

    def get(self, name: str) -> Tensor | None:
        return self.outputs.get(name)

    def request(self, names: Sequence[str]) -> None:
        """Ignore the request: all outputs are in memory."""

    def wait(self, name: str, timeout_s: float) -> bool:
        return name in self.outputs

    def drop_requests(self) -> None:
        """Do nothing: a step in memory has no requests."""

    def take_load_times(self) -> Sequence[LoadTime]:
        return ()


def copy_step(step: RecordedStep) -> MemoryStep | None:
    """Return a writable copy; None if parts of the step are not in this process."""
    outputs = {name: step.get(name) for name in step.names}
    whole = {name: output.clone() for name, output in outputs.items() if output is not None}
    if len(whole) < len(outputs):
        return None
    return MemoryStep(valid=step.valid, outputs=whole, prompt=step.prompt)


@dataclass(slots=True, kw_only=True, eq=False)
class ProjectionsRoom:
    """Memory that all steps share for projections. Its size is set before each forward pass."""

    left_bytes: int = 0


class StepProjections:
    """The cached keys and values of one denoising step, by transformer block."""

    def __init__(self, room: ProjectionsRoom) -> None:
        self.size_bytes = 0
        self._room = room
        self._kept: dict[str, Projections] = {}

    def get(self, name: str) -> Projections | None:
        return self._kept.get(name)

    def has_room(self, sizes_bytes: Mapping[str, int]) -> bool:
        return self._more_bytes(sizes_bytes) <= self._room.left_bytes

    def put(self, projections: Mapping[str, Projections]) -> None:
        more_bytes = self._more_bytes({name: each.size_bytes for name, each in projections.items()})
        if more_bytes > self._room.left_bytes:
            return
        self._kept.update(projections)
        self.size_bytes += more_bytes
        self._room.left_bytes -= more_bytes

    def _more_bytes(self, sizes_bytes: Mapping[str, int]) -> int:
        before = (self._kept[name].size_bytes for name in sizes_bytes if name in self._kept)
        return sum(sizes_bytes.values()) - sum(before)
