"""Reads activations for one image's steps from a recording, and adds steps and areas that the recording lacks.

The engine asks for a row's activations each time that it tries a step, and reports when the step is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bottega.addons.edits.engine.activations import EditActivations, KeptProjections
from bottega.addons.edits.engine.masked.tokens import MaskLevels, share
from bottega.addons.edits.engine.planner import Coming, ComingRow
from bottega.addons.edits.engine.recordings.recording import (
    Recording,
    StepKey,
    begins_with_noise,
    loras_rule_out_recordings,
    prompt_of,
    step_key,
)
from bottega.addons.edits.engine.recordings.source import ActivationSource
from bottega.addons.edits.engine.recordings.step import ProjectionsRoom, RecordedStep
from bottega.addons.edits.engine.recordings.step_access import (
    StepCompleter,
    StepLoadCounts,
    StepLoads,
    StepReader,
    StepRecorder,
)
from bottega.engine.request import Request
from bottega.model.rows import Half

FULL_MASK = "it redraws the whole image, its mask's margin included"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTerms:
    """The permissions of an image to use its recording."""

    completes: bool
    """Whether the image may add to the recording."""
    any_prompt: bool
    """Whether the image may reuse activations that were recorded with another prompt.

    If not, the half of guidance whose prompt differs computes all tokens and is recorded anew. That is rarely the
    unconditional half, because most edits have the same negative prompt."""
    projects_by_prompt: bool = False
    """Whether keys and values depend on the prompt as well, so that only steps with the recorded prompt cache them."""


class ImageReader:
    """Supplies an image with recorded outputs outside its mask, and completes the recording.

    `mask` includes the margin, bool [height, width] of the latent.
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
        """Whether a step was not reused because it was recorded with another prompt."""
        self.computed_all_because = ""
        """Why the newest row without reuse computed all tokens, as text; empty if every row reused outputs."""
        self.reused = 0
        """Number of transformer blocks that reused outputs so far, over all forward passes."""
        self.most_share = 0.0
        """Largest share of the tokens that a step computed, among steps that reused outputs."""
        self.wrote = False
        """Whether the image added to the recording."""
        self.loads: dict[StepKey, StepLoads] = {}
        """Load decisions for future steps."""
        self._source = source
        self._request = request
        self._mask = mask
        self._levels = levels
        self._terms = terms
        self._room = room
        self._shapes = shapes
        self._prompts = {
            half: prompt_of(request.spec, half, embeds_guidance=request.model.embeds_guidance) for half in Half
        }
        # All steps of a recording have the same blocks.
        self._kept = next((frozenset(step.names) for step in recording.steps.values()), None)
        self._plans = ValidPlans(mask, levels, completes=terms.completes)
        self._readers: dict[StepKey, tuple[StepReader, ValidPlan]] = {}
        self._sinks: dict[StepKey, StepRecorder] = {}
        self._completers: dict[StepKey, StepCompleter] = {}
        turns = range(request.evaluations_left)
        self._uses = {step_key(request, half, turn): request.evaluation + turn for turn in turns for half in Half}
        recording.users.add(self)

    def row(self, half: Half) -> EditActivations | None:
        """Return the activations of a row of the next step. A step that is retried may call this again."""
        if loras_rule_out_recordings(self._request):
            return None  # The recording was made with other weights.
        if begins_with_noise(self._request):
            self.computed_all_because = "at strength 1 it begins with noise alone"
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
            self.computed_all_because = (
                FULL_MASK if full else "the recording lacks the part that the edit does not redraw"
            )
            return None if sink is None else EditActivations(sink=sink)
        reader = StepReader(
            step,
            self._request.latent.device,
            self._loads_of(key, step),
            self._shapes,
            projections=self._projections(step, half),
        )
        self._readers[key] = reader, plan
        return EditActivations(computed=plan.computed, share=plan.share, recorded=reader, sink=sink)

    def made_step(self) -> StepLoadCounts:
        """Finish the step: write its new outputs to the recording, and return the counts of its loads."""
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
                self.computed_all_because = "its recorded activations did not arrive in time"
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
        """Share of the tokens that the next step computes, at the finest attention level."""
        if self._request.done or loras_rule_out_recordings(self._request) or begins_with_noise(self._request):
            return 1.0
        steps = [self._step(step_key(self._request, half)) for half in self._request.halves]
        return sum(1.0 if step is None else self._plans.plan(step.valid).share for step in steps) / len(steps)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the latent."""
        return self.recording.shape

    def coming(self, turn: int) -> Coming:
        """Return the rows that the image will compute in a later forward pass; the next one is `turn` 0."""
        request = self._request
        if turn >= request.evaluations_left:
            return (), 0
        rows = []
        for half in (
            request.halves if not (loras_rule_out_recordings(request) or begins_with_noise(request, turn)) else ()
        ):
            key = step_key(request, half, turn)
            step = self._step(key)
            plan = self._plans.plan(step.valid) if step is not None else None
            if step is not None and plan is not None and plan.computed is not None:
                row = ComingRow(key=key, step=step, computed=plan.computed, share=plan.share, loads=self.loads)
                rows.append(row)
        return rows, request.row_count - len(rows)

    def turns_until(self, key: StepKey) -> float:
        turns = self._uses.get(key, -1) - self._request.evaluation
        return turns if turns >= 0 else math.inf

    @property
    def outstanding(self) -> Iterable[StepLoads]:
        """Decisions whose loads may be pending. Tensors in the mapped memory of a store on this host need no load."""
        return (loads for loads in self.loads.values() if not loads.step.mapped)

    def close(self) -> None:
        """Cancel the image's pending requests."""
        self.recording.users.discard(self)
        while self.loads:
            self._drop_requests(self.loads.popitem()[1])

    def _projections(self, step: RecordedStep, half: Half) -> KeptProjections | None:
        """Return the step's cached keys and values; None on a GPU, which computes them faster than it copies them."""
        other_prompt = self._terms.projects_by_prompt and step.prompt != self._prompts[half]
        if other_prompt or self._request.latent.device.type != "cpu":
            return None
        return self.recording.projections(step, self._room)

    def _loads_of(self, key: StepKey, step: RecordedStep) -> StepLoads | None:
        """Return the decision for a step; None if there is none, or the step was replaced since."""
        loads = self.loads.get(key)
        return loads if loads is not None and loads.step is step else None

    def _drop_requests(self, loads: StepLoads) -> None:
        """Cancel pending requests, unless another image that reads the recording may wait for them."""
        alone = self.recording.readers <= 1 and self._request.spec.num_images == 1
        if alone and loads.outstanding:
            loads.step.drop_requests()

    def _step(self, key: StepKey) -> RecordedStep | None:
        """Return the recorded step that may be reused; None if there is none."""
        step = self.recording.step(key, self._prompts[key.half])
        if step is None or self._terms.any_prompt or step.prompt == self._prompts[key.half]:
            return step
        self.other_prompt = True
        return None

    def _new_row(self, key: StepKey) -> EditActivations | None:
        """Return a row that computes all tokens and records a step which the recording lacks for this prompt."""
        if not self._terms.completes:
            return None
        sink = self._sinks[key] = StepRecorder(self._kept)
        return EditActivations(sink=sink)

    def _add(self, key: StepKey, sink: StepRecorder) -> None:
        """Add a new step to the recording, if it fits and was not added meanwhile."""
        if not sink.outputs or self._step(key) is not None or not sink.finite:
            return
        if self._make_room(key, sink.size_bytes):
            self.recording.add(key, sink.outputs, ~self._mask, prompt=self._prompts[key.half])
            self._source.changed(self.recording, key)
            self.wrote = True

    def _make_room(self, key: StepKey, size_bytes: int) -> bool:
        """Return whether a step fits, after removing its recordings with other prompts if necessary."""
        recording, before = self.recording, self.recording.steps.get(key)
        recording.forget_other(key)
        if self._has_room(size_bytes, size_bytes):
            return True
        if before is None or not self._has_room(size_bytes - before.size_bytes, size_bytes - before.held_bytes):
            return False
        recording.forget(key)
        return True

    def _has_room(self, more_bytes: int, more_held_bytes: int) -> bool:
        """Return whether the recording may grow by `more_bytes`, of which `more_held_bytes` are in this process."""
        recording, budget_bytes = self.recording, self.recording.budget_bytes
        if budget_bytes and recording.recorded_bytes + more_bytes > budget_bytes:
            return False
        return self._source.reserve(recording, recording.held_bytes + more_held_bytes)

    def _writable(self, key: StepKey, step: RecordedStep) -> RecordedStep | None:
        """Return a step that may be written to; None if that needs a copy which cannot be made or does not fit."""
        if step.writable:
            return step
        if not self._has_room(0, step.size_bytes - step.held_bytes):
            return None
        return self.recording.writable(key, step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidPlan:
    """The areas to compute and to record, for one map of valid elements."""

    valid: Tensor
    """The map. The reference keeps the tensor alive, because plans are found by its identity."""
    computed: Tensor | None
    """Elements to compute, bool [height, width]; None for all."""
    share: float
    missing: Tensor | None
    """Whole cells that this edit adds to the recording; None for none."""


class ValidPlans:
    """The plans of one image, by map of valid elements. `mask` has its margin, bool [height, width] of the latent."""

    def __init__(self, mask: Tensor, levels: MaskLevels, *, completes: bool) -> None:
        self._mask = mask
        self._levels = levels
        self._completes = completes
        self._plans: dict[int, ValidPlan] = {}

    def plan(self, valid: Tensor) -> ValidPlan:
        """Return the plan for a map. Plans are cached."""
        plan = self._plans.get(id(valid))
        if plan is None:
            plan = self._plans[id(valid)] = self._made(valid)
        return plan

    def _made(self, valid: Tensor) -> ValidPlan:
        computed = self._mask | ~valid
        # A cell of the deepest level consists of whole tokens of all levels, so these tokens lie wholly outside the
        # mask.
        clean = whole_cells(~self._mask, self._levels.deepest)
        missing = clean & _cells_with(~valid, self._levels.deepest)
        return ValidPlan(
            valid=valid,
            computed=None if bool(computed.all()) else computed,
            share=share(computed, self._levels.finest),
            missing=missing if self._completes and bool(missing.any()) else None,
        )


def _cells_with(area: Tensor, cell: int) -> Tensor:
    """Return the cells with a side of `cell` elements that contain any element of an area, bool [height, width]."""
    return torch.logical_not(whole_cells(~area, cell))


def whole_cells(area: Tensor, cell: int) -> Tensor:
    """Return the part of an area, bool [height, width], that consists of whole cells with a side of `cell` elements."""
    outside = functional.max_pool2d((~area)[None].float(), cell, ceil_mode=True)[0] > 0
    height, width = area.shape
    return ~outside.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[:height, :width]
