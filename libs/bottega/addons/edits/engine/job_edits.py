"""One edit job: the first edit of an image (the template) records activations, and later edits reuse them.

An edit that reuses a recording also uses its image latent and noise outside the mask. The job decides this before its
first step. Later attempts at the job follow the decision, so that they draw the same picture with or without the
recording.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.edits.engine.kept import KeptLatents, KeptLatentsMismatch, read_kept, template_of
from bottega.addons.edits.engine.masked.tokens import share
from bottega.addons.edits.engine.order import Decided, PendingAnswer, read_decision
from bottega.addons.edits.engine.recordings.image_reader import FULL_MASK, ImageReader, ReadTerms
from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, RecordingKey
from bottega.addons.edits.engine.recordings.step_access import ImageRecorder, StepLoadCounts
from bottega.addons.edits.wire.messages import taken_from
from bottega.engine.addon import JobAddOn
from bottega.engine.encode import Conditions, Sources, encode_image
from bottega.engine.events import EngineRecord
from bottega.engine.forward import Prediction
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.latent_step import Edit
from bottega.engine.request import Request
from bottega.engine.spans import MAX_SPANS, StoreWork, TracedSpan
from bottega.engine.spec import ResolvedSpec
from bottega.v1.activations_pb2 import EditDecision
from bottega.v1.generation_pb2 import MaskUse

if TYPE_CHECKING:
    from bottega.addons.edits.engine.addon import EngineEdits

_log = logging.getLogger(__name__)

_FIRST = "it is the first edit of this image"
# The name of the track in a trace.
_TRACK = "activation store"


class JobEdits(JobAddOn):
    """The add-on's object for one edit job. `decided` is the decision of an earlier attempt."""

    def __init__(self, addon: EngineEdits, order: EngineOrder, decided: Decided | None) -> None:
        self._addon = addon
        self._order = order
        self._decided = decided
        self._because = addon.unusable or _unusable(order.spec)
        self._kept_name = ""  # The name of the kept latents that are put back.
        self._kept_unused = ""  # Why no kept latents are put back, as a clause.
        self._job: EngineJob | None = None
        self._found: Recording | None = None
        self._readers: dict[Request, ImageReader] = {}
        self._recorder: ImageRecorder | None = None
        self._readers_open = False
        self._any_prompt = False
        self._common = False  # Whether the image latent and the noise outside the mask come from another edit.
        self._recorded = False
        self._reused = self._total = 0
        self._dilated_share = 0.0
        self._waited_s = 0.0
        self._loads: list[TracedSpan] = []
        self._key = RecordingKey(model_hash="", dtype="", template="")
        self._answer: PendingAnswer | None = None
        if not self._because:
            self._key = addon.key(order, template_of(order.kept.get(addon.kind, b"")))
            if decided is None or decided.recording:
                self._answer = addon.ask(order, self._key, decided.recording if decided is not None else "")

    @property
    def _spec(self) -> ResolvedSpec:
        return self._order.spec

    @property
    def waiting_for(self) -> Future[StoreWork | None] | None:
        """The response for which the job waits; None if it waits for none."""
        return self._answer.asked if self._answer is not None else None

    def ready(self, now_s: float) -> bool:
        """Return whether the response about the template's recording has arrived or timed out."""
        return self._answer is None or self._answer.ready(now_s)

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Find the template's recording, or begin one. Raise InvalidRequest if the earlier decision is malformed."""
        self._job = job
        levels = self._addon.levels
        self._dilated_share = share(levels.dilated(_edit(job.requests[0]).mask), levels.finest)
        decided = read_decision(job.pinned) or self._decided
        if decided is None and any(request.begun for request in job.requests):
            decided = Decided()  # The job has begun with its own noise.
        kept = self._use_kept(job)
        if kept is None and self._order.kept and not self._because:
            self._key = self._addon.key(self._order)
        found = self._find(self._key, decided, job.requests[0].latent)
        if found is not None:
            # `close` releases the recording, whatever fails from here on.
            self._found, self._readers_open = found, True
            self._any_prompt = self._takes_any_prompt(job, conditions)
            self._read(found, job)
            decided = Decided(recording=found.id, seed=found.drawn.seed if found.drawn is not None else 0)
        elif decided is not None and decided.recording:
            self._because = self._because or _gone(job.requests)
            if kept is None:
                self._draw_again(decided.seed, job, conditions)
        elif not self._because:
            self._record(job.requests[0], decided, draws=kept is None)
        self._decided = decided or Decided()
        self.decision = self._taken(self._decided).SerializeToString()
        # A second worker has no recordings.
        self.offloadable = not self._readers and self._recorder is None

    def after_forward(self, prediction: Prediction) -> float:
        """Return the seconds that the last forward pass waited for this job's loads."""
        waited_s = sum(wait_s for row, wait_s in prediction.load_waits_s.items() if row.owner in self._readers)
        self._waited_s += waited_s
        return waited_s

    def after_step(self, request: Request) -> None:
        """Add the outputs of the step to the recording, and count the blocks that it reused."""
        if self._recorder is not None and self._recorder.request is request:
            self._recorder.made_step()
        reader = self._readers.get(request)
        if reader is not None:
            before = reader.reused
            counts = reader.made_step()
            self._addon.note_loads(counts)
            self._note_spans(request.step - 1, counts)
            reused, total = reader.reused - before, request.row_count * len(self._addon.blocks)
            self._reused, self._total = self._reused + reused, self._total + total
            self._addon.note_blocks(reused, total)

    def spans(self) -> Iterator[TracedSpan]:
        """Yield trace spans of the lookup and of the loads, with the store's own spans for both."""
        if self._answer is not None and self._answer.since_s is not None:
            begin_s, waited_s = self._answer.since_s, self._answer.waited_s
            yield TracedSpan(name="look-up", track=_TRACK, begin_s=begin_s, seconds=waited_s)
            if self._answer.work is not None:
                yield from self._answer.work.spans("look-ups")
        yield from self._loads

    def _note_spans(self, step: int, counts: StepLoadCounts) -> None:
        room = max(0, MAX_SPANS - len(self._loads))
        loads = [
            TracedSpan(
                name=f"load step {step}",
                track=_TRACK,
                begin_s=came.began_s,
                seconds=came.seconds,
                facts={"bytes": str(came.size_bytes)},
            )
            for came in counts.came
        ]
        waits = [
            TracedSpan(name=f"waiting for {wait.block}", track="waits", begin_s=wait.began_s, seconds=wait.seconds)
            for wait in counts.waits
        ]
        in_store = [span for came in counts.came if came.work is not None for span in came.work.spans("sections")]
        self._loads += [*loads, *waits, *in_store][:room]

    def report(self, record: EngineRecord) -> None:
        """Add what the edit did to the job's record, and complete the recording.

        Only now is it known whether residuals were stale; a recording that contains stale residuals is discarded.
        """
        if self._recorder is not None:
            if any(use.stale_steps for use in record.provenance.controlnets):
                self._recorder.give_up("residuals of its ControlNets were stale")
            self._recorded = self._recorder.complete()
        elif any(reader.wrote for reader in self._readers.values()):
            self._recorded = True
        record.provenance.blocks_reused, record.provenance.blocks_total = self._reused, self._total
        mask = MaskUse(
            computed_share=max((reader.most_share for reader in self._readers.values()), default=0.0),
            recording=taken_from(self._taken(self._decided or Decided())),
            computed_all_because="" if self._reused else self._reason(),
            recorded=self._recorded,
            dilated_share=self._dilated_share,
            kept_latents=bool(self._kept_name),
        )
        record.provenance.mask.CopyFrom(mask)
        record.exact &= not self._reused and not self._common
        waited_s = self._waited_s + (self._answer.waited_s if self._answer is not None else 0.0)
        if waited_s:
            record.seconds[kinds.ACTIVATIONS] = waited_s

    def close(self) -> None:
        """Release the recording that was read, and discard a new one if the job did not finish."""
        if self._answer is not None:
            self._answer.close()
        for reader in self._readers.values():
            reader.close()
        readers, self._readers_open = self._readers_open, False
        if readers and self._found is not None:
            self._addon.source.release(self._found)
        if self._recorder is not None and not (self._job is not None and self._job.finished):
            self._recorder.give_up("the edit that recorded it did not finish")

    def _use_kept(self, job: EngineJob) -> KeptLatents | None:
        """Make the images restore the kept latents of their template outside the mask, if there are any that fit.

        This also happens on workers that compute all tokens, so that every attempt draws the same picture.
        """
        data = self._order.kept.get(self._addon.kind)
        if not data:
            return None
        first = job.requests[0]
        try:
            kept = read_kept(data, self._addon.model, tuple(first.latent.shape[1:]))
        except KeptLatentsMismatch as error:
            _log.warning("kept latents do not fit the edit, which computes everything", extra={"why": str(error)})
            self._kept_unused = "its kept latents do not fit"
            return None
        trajectory = kept.trajectory(first.noise_levels, first.first_evaluation)
        if trajectory is None:
            self._kept_unused = "its kept latents lack some of its steps"
            return None
        for request in job.requests:
            image_latent = kept.image_latent.clone()
            request.use_edit(replace(_edit(request), image_latent=image_latent, trajectory=trajectory))
        self._common, self._kept_name = True, kept.template
        return kept

    def _taken(self, decided: Decided) -> EditDecision:
        return EditDecision(recording=decided.recording, seed=decided.seed, kept_latents=self._kept_name)

    def _find(self, key: RecordingKey, decided: Decided | None, latent: Tensor) -> Recording | None:
        """Return the recording to read, marked as in use; None if there is none."""
        if self._because or (decided is not None and not decided.recording):
            return None
        found = self._addon.source.find(key, decided.recording if decided is not None else "")
        if found is None or _fits(found, latent):
            return found
        _log.warning("a recording does not have the size of its image; the edit computes everything")
        self._addon.source.release(found)
        self._because = "the recording of this image has another size"
        return None

    def _takes_any_prompt(self, job: EngineJob, conditions: Conditions) -> bool:
        """Return whether this edit may reuse activations of another prompt."""
        edit = self._spec.edit
        if edit is not None and edit.any_prompt:
            return True
        return not self._addon.blocks_depend_on_prompt(self._spec, conditions, job.requests[0])

    def _read(self, found: Recording, job: EngineJob) -> None:
        self._addon.use_profile(found)
        # Activations computed with stale residuals must not enter the template, and it is not known in advance at which
        # steps residuals will be stale.
        completes = not (self._spec.stale_residuals and self._spec.controlnets)
        terms = ReadTerms(
            completes=completes, any_prompt=self._any_prompt, projects_by_prompt=self._addon.projects_by_prompt
        )
        for request in job.requests:
            if found.drawn is not None:
                self._compose(request, found.drawn.image_latent, found.drawn.noise)
            mask = self._addon.levels.dilated(_edit(request).mask)
            reader = self._readers[request] = ImageReader(
                self._addon.source,
                found,
                request,
                mask=mask,
                levels=self._addon.levels,
                terms=terms,
                room=self._addon.projections_room,
                shapes=self._addon.times.shapes(found.shape),
            )
            request.activations = reader

    def _record(self, request: Request, decided: Decided | None, *, draws: bool) -> None:
        """Begin a recording of the job's first image, unless another edit is recording the template.

        `decided` is the decision of an earlier attempt that used no recording. If `draws` is set, the recording keeps
        the edit's own image latent and noise.
        """
        edit = _edit(request)
        redrawn = self._addon.levels.dilated(edit.mask)
        if redrawn.all():
            self._because = FULL_MASK
            return
        drawn = DrawnTemplate(
            image_latent=edit.image_latent.cpu(), noise=edit.noise.cpu(), seed=self._spec.seed + request.index
        )
        _, _, height, width = request.latent.shape
        begun = self._addon.begin(self._order, self._key, (height, width), drawn if draws else None)
        if begun is None:
            began = "an earlier attempt began without the recording"
            self._because = "another edit is recording this image" if decided is None else began
            return
        self._recorder = self._addon.recorder(begun, request, ~redrawn)
        request.activations = self._recorder

    def _draw_again(self, seed: int, job: EngineJob, conditions: Conditions) -> None:
        """Draw the image latent and noise of a lost recording again from its seed, for images that have not begun."""
        if self._order.image is None or all(request.begun for request in job.requests):
            self._common = True
            return
        spec = replace(self._spec, seed=seed, num_images=1)
        image = encode_image(self._addon.model, self._order.image)
        sources = Sources(image=image, mask=_edit(job.requests[0]).mask)
        drawn = _edit(Request(self._addon.model, spec, conditions, sources=sources))
        for request in job.requests:
            self._compose(request, drawn.image_latent, drawn.noise)

    def _compose(self, request: Request, image_latent: Tensor, noise: Tensor) -> None:
        """Use the recording's noise outside the mask and the request's own inside. Skip requests that were resumed."""
        self._common = True
        edit = _edit(request)
        if not request.begun:
            inside = edit.mask > 0
            composed = torch.where(inside, edit.noise, noise.to(edit.noise))
            # Copied, because a checkpoint must not contain two tensors that share memory.
            own_latent = image_latent.to(edit.image_latent, copy=True)
            request.use_edit(replace(edit, image_latent=own_latent, noise=composed))

    def _reason(self) -> str:
        """Return why the edit computed everything, as text."""
        return "; ".join(reason for reason in (self._own_reason(), self._kept_unused) if reason)

    def _own_reason(self) -> str:
        if self._recorder is not None:
            lost = self._recorder.lost
            return f"{_FIRST}, and it is not recorded: {lost}" if lost else _FIRST
        if any(reader.other_prompt for reader in self._readers.values()):
            return f"it was recorded with another prompt, on which this model depends ({self._addon.cosine_text})"
        return self._because or next((reader.computed_all_because for reader in self._readers.values()), "")


def _gone(requests: Sequence[Request]) -> str:
    """Return, as text, that the recording which an earlier attempt used no longer exists."""
    gone = "the recording that an earlier attempt used is gone"
    resumed = [request.step - request.begin for request in requests if request.begun]
    return f"{gone}; step {min(resumed) + 1} is the first that was made without it" if resumed else gone


def _unusable(spec: ResolvedSpec) -> str:
    """Return why an edit can neither read nor write recordings, as a clause; empty if it can."""
    if spec.loras_measured or any(control.measured for control in spec.controlnets):
        return "the effect of a LoRA or ControlNet is being measured"
    if not all(control.digest for control in spec.controlnets):
        return "the version of a ControlNet is not known"
    return ""


def _fits(recording: Recording, latent: Tensor) -> bool:
    """Return whether a recording's tensors have the latent's shape. A store's data is not trusted."""
    drawn = recording.drawn
    tensors = () if drawn is None else (drawn.image_latent, drawn.noise)
    return recording.shape == latent.shape[2:] and all(tensor.shape == latent.shape for tensor in tensors)


def _edit(request: Request) -> Edit:
    assert request.edit is not None, "the order has a mask"
    return request.edit
