"""How a row of an edit reads, records or completes a recorded step, how an image is recorded, and planned loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor
from torch.nn import functional

from bottega.addons.edits.engine.activations import EditActivations, KeptProjections
from bottega.addons.edits.engine.masked.work import BlockWork
from bottega.addons.edits.engine.recordings.recording import (
    Recording,
    StepKey,
    begins_with_noise,
    loras_rule_out_recordings,
    prompt_of,
    step_key,
)
from bottega.addons.edits.engine.recordings.source import ActivationSource
from bottega.addons.edits.engine.recordings.step import LoadTime, RecordedStep
from bottega.device.device import Device, HostCopy
from bottega.device.devices import open_device
from bottega.engine.request import Request
from bottega.model.rows import Half


class StepReader:
    """The RecordedActivations of a row that reads a recorded step.

    Args:
        loads: The plan for outputs that must be loaded; without a plan they are computed instead.
        shapes: Expected shapes, by name. An output of another shape, from a faulty store, is computed instead, because
            it would fail the whole batch. None skips the check.
        projections: The step's cached keys and values; None to cache none.
    """

    def __init__(
        self,
        step: RecordedStep,
        device: torch.device,
        loads: StepLoads | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        projections: KeptProjections | None = None,
    ) -> None:
        self.projections = projections
        self.reused: set[str] = set()
        self.waited_s = 0.0
        self._step = step
        self._device = device
        self._loads = loads
        self._shapes = shapes

    def get(self, name: str) -> Tensor | None:
        output = self._step.get(name)
        if output is None and self._loads is not None:
            output = self._awaited(name, self._loads)
        if output is None or (self._shapes is not None and output.shape != self._shapes.get(name)):
            return None
        self.reused.add(name)
        if output.is_pinned():
            return output.to(self._device, non_blocking=True)
        return open_device(self._device).to_device(output)  # A view of a store's file is not pinned.

    def stored(self, name: str) -> Tensor | None:
        return self._step.get(name)

    def put(self, name: str, output: Tensor) -> None:
        """Ignore the output, because `EditActivations.sink` records it."""

    def _awaited(self, name: str, loads: StepLoads) -> Tensor | None:
        before_s = loads.waited_s
        here = loads.wait_for(name)
        self.waited_s += loads.waited_s - before_s
        return self._step.get(name) if here else None


class StepRecorder:
    """The StepActivations of a row that computes all tokens. They are discarded if the forward pass fails."""

    def __init__(self, kept: frozenset[str] | None = None) -> None:
        self.size_bytes = 0
        """Bytes recorded so far."""
        self._copies: dict[str, HostCopy] = {}
        self._kept = kept

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The outputs by name, float16 on the CPU. Waits until the device has computed them."""
        return {name: copy.take() for name, copy in self._copies.items()}

    def get(self, name: str) -> Tensor | None:
        copy = self._copies.get(name)
        return None if copy is None else copy.take()

    def put(self, name: str, output: Tensor) -> None:
        if self._kept is None or name in self._kept:
            # Copied, because later blocks may write to the output while it is being transferred.
            own = output.detach().to(torch.float16, copy=True, memory_format=torch.contiguous_format)
            before = self._copies.get(name)
            self.size_bytes += own.nbytes - (0 if before is None else before.take().nbytes)
            self._copies[name] = open_device(own.device).to_host(own)

    @property
    def finite(self) -> bool:
        """Whether no output has values beyond the range of float16."""
        return _finite(self.outputs.values())


class StepCompleter:
    """The StepActivations of a row that adds missing parts of the template to a recorded, writable step.

    All outputs inside `area`, bool [height, width] of the latent, show the template, even if the forward pass fails.
    """

    def __init__(self, step: RecordedStep, area: Tensor) -> None:
        self.step = step
        self.area = area
        self._copies: dict[str, HostCopy] = {}
        self._within: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def get(self, name: str) -> Tensor | None:
        return self.step.get(name)

    def put(self, name: str, output: Tensor) -> None:
        stored = self.step.get(name)
        if stored is None or stored.shape != output.shape:
            return  # Outputs that were not recorded are computed in full by every edit.
        device = open_device(output.device)
        _, index = self._inside(output, device)
        # Selected by index: a boolean mask would make the CPU wait for a GPU to count its elements.
        cut = output.detach().index_select(0, index) if output.ndim == 2 else output.flatten(1).index_select(1, index)
        self._copies[name] = device.to_host(cut.to(torch.float16))

    @torch.inference_mode()
    def write(self) -> bool:
        """Write the outputs into the step, waiting for the device, and return whether any were written.

        If one output has values beyond float16, none is written, because edits that read the step would fail.
        """
        outputs = {name: copy.take() for name, copy in self._copies.items()}
        self._copies = {}
        if not outputs or not _finite(outputs.values()):
            return False
        for name, output in outputs.items():
            stored = self.step.get(name)
            if stored is not None:
                inside, _ = self._inside(stored, open_device(stored.device))
                stored[(inside.flatten(),) if stored.ndim == 2 else (slice(None), inside)] = output
        return True

    def _inside(self, output: Tensor, device: Device) -> tuple[Tensor, Tensor]:
        """Return the area at an output's resolution: bool [height, width] on the CPU, and its indices on the device."""
        # Cells are whole tokens of every level.
        size = level_of(self.area.shape, output.shape[0]) if output.ndim == 2 else (output.shape[1], output.shape[2])
        if size not in self._within:
            area = self.area[None].float()
            while area.shape[1] > size[0] or area.shape[2] > size[1]:
                area = functional.max_pool2d(area, 2, ceil_mode=True)
            inside = area[0] > 0
            self._within[size] = inside, device.to_device(inside.flatten().nonzero()[:, 0])
        return self._within[size]


def _finite(outputs: Iterable[Tensor]) -> bool:
    """Return whether no output, all on the CPU, has values beyond the range of float16."""
    return all(bool(torch.isfinite(output).all()) for output in outputs)


def level_of(shape: tuple[int, ...], tokens: int) -> tuple[int, int]:
    """Return the size at which a latent of this shape has this number of tokens. Raise ValueError if none fits."""
    height, width = shape[-2:]
    while height * width > tokens:
        height, width = -(-height // 2), -(-width // 2)
    if height * width != tokens:
        raise ValueError(f"a latent of {tuple(shape)} has no level of {tokens} tokens")
    return height, width


# Shorter waits are mere look-ups.
_LEAST_WAIT_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWait:
    """A period in which the engine waited for a block's activations."""

    block: str
    began_s: float
    """Start of the wait, on CLOCK_MONOTONIC."""
    seconds: float


@dataclass(slots=True, kw_only=True)
class StepLoadCounts:
    """Counts about the loads of finished steps."""

    loaded: int = 0
    """Blocks that used loaded activations."""
    recomputed: int = 0
    """Recorded blocks that were computed because their activations were not loaded."""
    waited_s: float = 0.0
    """Seconds that the engine waited for loads."""
    waits: list[LoadWait] = field(default_factory=list)
    """Waits of at least 0.1 ms; shorter ones are only lookups."""
    came: list[LoadTime] = field(default_factory=list)
    """Times of the loads that arrived."""

    def add(self, other: StepLoadCounts) -> None:
        self.loaded += other.loaded
        self.recomputed += other.recomputed
        self.waited_s += other.waited_s
        self.waits += other.waits
        self.came += other.came


class StepLoads:
    """The load decision for one row of one step, with the row's planned seconds for each block."""

    def __init__(self, step: RecordedStep, seconds: Sequence[float] = ()) -> None:
        self.step = step
        self.seconds = seconds
        self.waited_s = 0.0
        self._waits: list[LoadWait] = []
        self._away: list[BlockWork] = []
        self._blocks: dict[str, str] = {}
        self._patience_s: dict[str, float] = {}
        self._outstanding: deque[tuple[int, str]] = deque()

    def compute(self, block: BlockWork) -> None:
        """Plan to compute a block, although a store has its activations."""
        self._away.append(block)

    def take(self, block: BlockWork, names: Sequence[str], patience_s: float, number: int) -> None:
        """Plan to reuse a block whose missing outputs, `names`, were requested; wait `patience_s` for all of them.

        `number` is the position of the request among all requests of the planner.
        """
        self._away.append(block)
        self._blocks |= dict.fromkeys(names, block.name)
        self._patience_s[block.name] = patience_s
        self._outstanding.extend((number, name) for name in names)

    @property
    def outstanding(self) -> Collection[tuple[int, str]]:
        """Request number and name of each output that has not arrived, in the order in which they will arrive."""
        while self._outstanding and self.step.get(self._outstanding[0][1]) is not None:
            self._outstanding.popleft()
        return self._outstanding

    def wait_for(self, name: str) -> bool:
        """Wait for a planned output, within the time left for its block, and return whether it arrived."""
        block = self._blocks.get(name)
        if block is None or self._patience_s[block] <= 0.0:
            return False
        began_s = monotonic()
        here = self.step.wait(name, self._patience_s[block])
        waited_s = monotonic() - began_s
        self.waited_s += waited_s
        if waited_s >= _LEAST_WAIT_S:
            self._waits.append(LoadWait(block=block, began_s=began_s, seconds=waited_s))
        # If one output is late, the block is computed, and its others are not needed.
        self._patience_s[block] = self._patience_s[block] - waited_s if here else 0.0
        return here

    def counts(self, reused: Collection[str]) -> StepLoadCounts:
        """Return the counts of the finished step, in which the row reused the outputs `reused`."""
        loaded = sum(all(name in reused for name in block.names) for block in self._away)
        return StepLoadCounts(
            loaded=loaded,
            recomputed=len(self._away) - loaded,
            waited_s=self.waited_s,
            waits=self._waits,
            came=list(self.step.take_load_times()),
        )


class ImageRecorder:
    """Records one image into a new recording. `valid`, bool [height, width], is True where it shows the template."""

    def __init__(
        self,
        source: ActivationSource,
        recording: Recording,
        request: Request,
        valid: Tensor,
        *,
        kept: frozenset[str] | None = None,
    ) -> None:
        self.lost = ""
        """Why the recording was discarded; empty if it was not."""
        self._kept = kept
        self.request = request
        self.recording = recording
        self._source = source
        self._valid = valid
        self._pending: dict[StepKey, StepRecorder] = {}

    def row(self, half: Half) -> EditActivations | None:
        """Return the activations of a row of the next step. A step that is retried may call this again."""
        if not self.lost and loras_rule_out_recordings(self.request):
            norms = self.request.loras_now is not None
            self.give_up("a LoRA changes normalisation layers" if norms else "a LoRA arrived only after the first step")
        if not self.lost and self._kept is not None and not self._kept:
            self.give_up("its activations do not fit into memory")
        if self.lost or begins_with_noise(self.request):
            return None
        sink = self._pending[step_key(self.request, half)] = StepRecorder(self._kept)
        return EditActivations(sink=sink)

    def made_step(self) -> None:
        """Add the step to the recording."""
        pending, self._pending = self._pending, {}
        # Rows of a step that did not run may be pending as well; they have no outputs.
        made = {key: sink for key, sink in pending.items() if sink.outputs}
        if self.lost or not made:
            return
        size_bytes = sum(sink.size_bytes for sink in made.values())
        if not all(sink.finite for sink in made.values()):
            self.give_up("its activations exceed the range of float16")
        elif not self._source.reserve(self.recording, self._expected(size_bytes)):
            self.give_up("its activations do not fit into memory")
        else:
            for key, sink in made.items():
                request = self.request
                prompt = prompt_of(request.spec, key.half, embeds_guidance=request.model.embeds_guidance)
                self.recording.add(key, sink.outputs, self._valid, prompt=prompt)
                self._source.changed(self.recording, key)

    @property
    def next_share(self) -> float:
        """Share of the tokens that the next step computes: always 1, because recording needs all of them."""
        return 1.0

    def complete(self) -> bool:
        """Publish the recording, and return whether there is one."""
        if not self.lost and not self.recording.steps:
            self.give_up("no block was recorded")
        if not self.lost:
            self._source.complete(self.recording)
        return not self.lost

    def give_up(self, why: str) -> None:
        """Discard the recording. Later calls do nothing."""
        if not self.lost:
            self.lost = why
            self._source.abandon(self.recording)

    def _expected(self, step_bytes: int) -> int:
        """Return the expected bytes of the whole recording, computed from the step that just ended."""
        return self.recording.held_bytes + step_bytes * (1 + self.request.evaluations_left)
