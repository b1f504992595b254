"""What one image's steps take from a recording, and what they complete of it.

It is asked for the activations of a row as often as its step is tried, and told when the step is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from bottega.diffusion.editing.loading.planner import Coming, ComingRow
from bottega.diffusion.editing.recordings.keys import StepKey, prompt_of
from bottega.diffusion.editing.recordings.mask_levels import MaskLevels
from bottega.diffusion.editing.recordings.projections import ProjectionsRoom
from bottega.diffusion.editing.recordings.recording import Recording
from bottega.diffusion.editing.recordings.request_steps import begins_with_noise, lacks_loras, step_key
from bottega.diffusion.editing.recordings.source import ActivationSource
from bottega.diffusion.editing.recordings.step import RecordedStep
from bottega.diffusion.editing.recordings.step_access import StepCompleter, StepReader, StepRecorder
from bottega.diffusion.editing.recordings.step_loads import StepLoadCounts, StepLoads
from bottega.diffusion.editing.recordings.valid_plans import ValidPlan, ValidPlans
from bottega.diffusion.engine.request import Request
from bottega.diffusion.rows import Half, KeptProjections, RowActivations

FULL_MASK = "it redraws the whole image, its mask's margin included"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTerms:
    """What an image may do with its recording.

    completes: whether it may write. any_prompt: whether it takes what was computed with another prompt; else it
    computes that half in full, and puts it in place of the other. The unconditional half has the same prompt in most
    edits.
    """

    completes: bool
    any_prompt: bool


class ImageReader:
    """Takes what one image does not redraw from a recording, and completes that.

    shapes: see StepReader. room: see StepProjections. mask: what the edit redraws, dilated; bool [height, width] of the
    latent.
    reused: transformer blocks that took what they did not compute from it. most_share: the largest share of the tokens
    that a step has computed, of those that took anything. wrote: whether it has completed anything. other_prompt:
    whether it has met another prompt that it does not take. computed_all_because: why the newest row that took nothing
    did not, in words. loads: what was decided about steps that come.
    """

    def __init__(
        self,
        source: ActivationSource,
        recording: Recording,
        request: Request,
        *,
        mask: Tensor,
        levels: MaskLevels,
        terms: ReadTerms,
        room: ProjectionsRoom,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.recording = recording
        self.other_prompt = False
        self.computed_all_because = ""
        self.reused = 0
        self.most_share = 0.0
        self.wrote = False
        self.loads: dict[StepKey, StepLoads] = {}
        self._source = source
        self._request = request
        self._mask = mask
        self._levels = levels
        self._terms = terms
        self._room = room
        self._shapes = shapes
        self._prompts = {half: prompt_of(request.spec, half) for half in Half}
        # A recording has the same blocks in all of its steps.
        self._kept = next((frozenset(step.names) for step in recording.steps.values()), None)
        self._plans = ValidPlans(mask, levels, completes=terms.completes)
        self._readers: dict[StepKey, tuple[StepReader, ValidPlan]] = {}
        self._sinks: dict[StepKey, StepRecorder] = {}
        self._completers: dict[StepKey, StepCompleter] = {}
        steps = range(request.step, request.end)
        self._uses = {step_key(request, half, step - request.step): step for step in steps for half in Half}
        recording.users.add(self)

    def row(self, half: Half) -> RowActivations | None:
        """Of the step that comes next; asked again where that is tried again."""
        if lacks_loras(self._request):
            return None  # of another set of weights than the recording
        if begins_with_noise(self._request):
            self.computed_all_because = "with strength 1 it begins with nothing of the image"
            return None
        key = step_key(self._request, half)
        step = self._step(key)
        if step is None:
            self.computed_all_because = "the recording has none of its steps"
            return self._new_row(key)
        plan = self._plans.plan(step.valid)
        sink = None
        if plan.missing is not None and (written := self._writable(key, step)) is not None:
            step, sink = written, StepCompleter(written, plan.missing)
            self._completers[key] = sink
        if plan.computed is None:
            full = bool(self._mask.all())
            self.computed_all_because = FULL_MASK if full else "the recording has nothing of what it does not redraw"
            return None if sink is None else RowActivations(sink=sink)
        reader = StepReader(
            step,
            self._request.latent.device,
            self._loads_of(key, step),
            self._shapes,
            projections=self._projections(step),
        )
        self._readers[key] = reader, plan
        return RowActivations(computed=plan.computed, share=plan.share, recorded=reader, sink=sink)

    def made_step(self) -> StepLoadCounts:
        """The step is made. What of it had to be loaded."""
        counts = StepLoadCounts()
        readers, self._readers = self._readers, {}
        sinks, self._sinks = self._sinks, {}
        completers, self._completers = self._completers, {}
        for key, (reader, plan) in readers.items():
            blocks = len(reader.reused & self._levels.blocks)
            self.reused += blocks
            if blocks:
                self.most_share = max(self.most_share, plan.share)
            else:
                self.computed_all_because = "what is recorded of it did not come in time"
            if (loads := self.loads.pop(key, None)) is not None:
                counts.add(loads.counts(reader.reused))
                self._drop_requests(loads)
        for key, completer in completers.items():
            if completer.write():
                self.recording.grow(completer.step, completer.area, prompt=self._prompts[key.half])
                if self.recording.steps.get(key) is completer.step:
                    self._source.changed(self.recording, key)
                self.wrote = True
        for key, sink in sinks.items():
            self._add(key, sink)
        return counts

    @property
    def next_share(self) -> float:
        """The share of the tokens that the next step computes, at the finest level of attention."""
        if self._request.done or lacks_loras(self._request) or begins_with_noise(self._request):
            return 1.0
        halves = tuple(Half) if self._request.spec.guided else (Half.CONDITIONAL,)
        steps = [self._step(step_key(self._request, half)) for half in halves]
        return sum(1.0 if step is None else self._plans.plan(step.valid).share for step in steps) / len(steps)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its latent."""
        return self.recording.shape

    def coming(self, turn: int) -> Coming:
        """Its rows of the step that it makes in so many turns, for the planner."""
        request = self._request
        if request.step + turn >= request.end:
            return (), 0
        halves = tuple(Half) if request.spec.guided else (Half.CONDITIONAL,)
        rows = []
        for half in halves if not (lacks_loras(request) or begins_with_noise(request, turn)) else ():
            key = step_key(request, half, turn)
            step = self._step(key)
            plan = self._plans.plan(step.valid) if step is not None else None
            if step is not None and plan is not None and plan.computed is not None:
                row = ComingRow(key=key, step=step, computed=plan.computed, share=plan.share, loads=self.loads)
                rows.append(row)
        return rows, len(halves) - len(rows)

    def turns_until(self, key: StepKey) -> float:
        turns = self._uses.get(key, -1) - self._request.step
        return turns if turns >= 0 else math.inf

    @property
    def outstanding(self) -> Iterable[StepLoads]:
        """What was decided for it and may not be here; what a host's store maps takes no time of the load stream."""
        return (loads for loads in self.loads.values() if not loads.step.mapped)

    def close(self) -> None:
        """The job is over: what was requested for it is not needed any more."""
        self.recording.users.discard(self)
        while self.loads:
            self._drop_requests(self.loads.popitem()[1])

    def _projections(self, step: RecordedStep) -> KeptProjections | None:
        """On a CPU alone: a device computes them sooner than it is given them."""
        if self._request.latent.device.type != "cpu":
            return None
        return self.recording.projections(step, self._room)

    def _loads_of(self, key: StepKey, step: RecordedStep) -> StepLoads | None:
        """What was decided for a step, as it is now."""
        loads = self.loads.get(key)
        return loads if loads is not None and loads.step is step else None

    def _drop_requests(self, loads: StepLoads) -> None:
        """What has not come is of no use to this image. Others that read the recording may still wait for it."""
        alone = self.recording.readers <= 1 and self._request.spec.num_images == 1
        if alone and loads.outstanding:
            loads.step.drop_requests()

    def _step(self, key: StepKey) -> RecordedStep | None:
        """What it may take; None where that was not recorded, or with another prompt."""
        step = self.recording.step(key, self._prompts[key.half])
        if step is None or self._terms.any_prompt or step.prompt == self._prompts[key.half]:
            return step
        self.other_prompt = True
        return None

    def _new_row(self, key: StepKey) -> RowActivations | None:
        """Of a step that the recording does not have, or with another prompt: computed in full."""
        if not self._terms.completes:
            return None
        sink = self._sinks[key] = StepRecorder(self._kept)
        return RowActivations(sink=sink)

    def _add(self, key: StepKey, sink: StepRecorder) -> None:
        """Takes a step into the recording, where there is room; it may be there by now."""
        if not sink.outputs or self._step(key) is not None or not sink.finite:
            return
        if self._make_room(key, sink.size_bytes):
            self.recording.add(key, sink.outputs, ~self._mask, prompt=self._prompts[key.half])
            self._source.changed(self.recording, key)
            self.wrote = True

    def _make_room(self, key: StepKey, size_bytes: int) -> bool:
        """Whether there is room for so much more, of a step; what it has of other prompts may have to go for it."""
        recording, before = self.recording, self.recording.steps.get(key)
        recording.forget_other(key)
        if self._has_room(size_bytes, size_bytes):
            return True
        if before is None or not self._has_room(size_bytes - before.size_bytes, size_bytes - before.held_bytes):
            return False
        recording.forget(key)
        return True

    def _has_room(self, more_bytes: int, more_held_bytes: int) -> bool:
        """more_bytes: of the template. more_held_bytes: of this process's memory."""
        recording, budget_bytes = self.recording, self.recording.budget_bytes
        if budget_bytes and recording.recorded_bytes + more_bytes > budget_bytes:
            return False
        return self._source.reserve(recording, recording.held_bytes + more_held_bytes)

    def _writable(self, key: StepKey, step: RecordedStep) -> RecordedStep | None:
        """The step to complete; None where it may not be written to, and there is no copy or no room for one."""
        if step.writable:
            return step
        if not self._has_room(0, step.size_bytes - step.held_bytes):
            return None
        return self.recording.writable(key, step)
