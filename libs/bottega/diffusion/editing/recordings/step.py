"""What one forward of a template has put out, as its readers see it: it may be in this process, or on its way here.

Whose it is, and who brings it, the source of its recording says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.diffusion.engine.store_work import StoreWork


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTime:
    """How long something was on its way. began_s: when it was requested, on CLOCK_MONOTONIC. work: of the store."""

    began_s: float
    seconds: float
    size_bytes: int
    work: StoreWork | None = None


class RecordedStep(Protocol):
    """One forward's outputs by name, float16, on the CPU; see StepActivations. All calls come from the engine's thread.

    valid: see Recording. prompt: what it was computed with, see `prompt_of`; empty where that was more than one.
    """

    valid: Tensor
    prompt: str

    @property
    def names(self) -> Collection[str]:
        """Of all that was recorded, in the order in which the network puts it out."""
        ...

    @property
    def size_bytes(self) -> int:
        """Of all that was recorded, wherever it is."""
        ...

    @property
    def held_bytes(self) -> int:
        """What it takes of this process's memory; none of what it shares with a store."""
        ...

    @property
    def writable(self) -> bool:
        """Whether its tensors may be written to."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether what is requested is memory of this host, which comes at once and keeps no stream of loads busy."""
        ...

    def bytes_of(self, name: str) -> int:
        """Of one of its names, wherever it is; 0 for another one."""
        ...

    def get(self, name: str) -> Tensor | None:
        """What is here now; None where that is not recorded, or not here yet. Nobody writes to it, but see writable."""
        ...

    def request(self, names: Sequence[str]) -> None:
        """Has these loaded, in this order, behind what was requested before. Harmless for what is here or requested."""
        ...

    def wait(self, name: str, timeout_s: float) -> bool:
        """Waits for one that was requested. Whether it is here; at once where it will not come."""
        ...

    def drop_requests(self) -> None:
        """What was requested and has not come is not needed any more. Harmless the second time."""
        ...

    def take_load_times(self) -> Sequence[LoadTime]:
        """Of what has come since this was last asked, whoever requested it."""
        ...


class MemoryStep:
    """All of a forward in this process. outputs: by name, float16, on the CPU, in the order of `names`."""

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
        """It is here."""

    def wait(self, name: str, timeout_s: float) -> bool:
        return name in self.outputs

    def drop_requests(self) -> None:
        """There are none."""

    def take_load_times(self) -> Sequence[LoadTime]:
        return ()


def copy_step(step: RecordedStep) -> MemoryStep | None:
    """A copy that may be written to; None where not all of it is here."""
    outputs = {name: step.get(name) for name in step.names}
    whole = {name: output.clone() for name, output in outputs.items() if output is not None}
    if len(whole) < len(outputs):
        return None
    return MemoryStep(valid=step.valid, outputs=whole, prompt=step.prompt)
