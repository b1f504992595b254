"""Recordings whose steps are not in the process: their tensors come when they are requested, as a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.addons.edits.engine.recordings.step import LoadTime, MemoryStep, RecordedStep


class StepElsewhere:
    """A RecordedStep. requested: names, in order. comes: whether one that was requested is there when waited for.
    waits_s: how long each wait for one may be."""

    writable = False
    mapped = False
    held_bytes = 0

    def __init__(self, step: MemoryStep, comes: Callable[[str], bool]) -> None:
        self.valid = step.valid
        self.prompt = step.prompt
        self.size_bytes = step.size_bytes
        self.requested: list[str] = []
        self.drops = 0
        self.waits_s: list[float] = []
        self._comes = comes
        self._outputs = step.outputs
        self._here: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        return list(self._outputs)

    def bytes_of(self, name: str) -> int:
        return self._outputs[name].nbytes if name in self._outputs else 0

    def get(self, name: str) -> Tensor | None:
        return self._outputs[name] if name in self._here else None

    def request(self, names: Sequence[str]) -> None:
        self.requested.extend(names)

    def wait(self, name: str, timeout_s: float) -> bool:
        assert name in self.requested, f"{name} was never requested"
        self.waits_s.append(timeout_s)
        if not self._comes(name):
            time.sleep(timeout_s)
            return False
        self._here.add(name)
        return True

    def drop_requests(self) -> None:
        self.drops += 1

    def take_load_times(self) -> Sequence[LoadTime]:
        return ()

    def load(self) -> None:
        """All of it is here from now on."""
        self._here = set(self._outputs)


class ActivationsElsewhere(MemoryActivations):
    """comes: see StepElsewhere. load_bytes_per_s: what it says; None until `move`."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.comes: Callable[[str], bool] = lambda name: True

    def move(self, load_bytes_per_s: float = 1e9) -> list[StepElsewhere]:
        """The steps of all recordings are elsewhere from now on."""
        self.load_bytes_per_s = load_bytes_per_s
        moved = []
        for recording in self.recordings:
            for key, step in list(recording.steps.items()):
                recording.put(key, made := StepElsewhere(in_memory(step), lambda name: self.comes(name)))
                moved.append(made)
        return moved


def in_memory(step: RecordedStep) -> MemoryStep:
    """The same, all of it here."""
    if isinstance(step, MemoryStep):
        return step
    assert isinstance(step, StepElsewhere)
    return MemoryStep(valid=step.valid, outputs=step._outputs, prompt=step.prompt)
