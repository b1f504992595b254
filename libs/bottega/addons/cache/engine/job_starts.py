"""The cached latents of one job: the query when its prompt is encoded, and pictures that start from a response."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.cache.engine.order import StartOrder, read_decision
from bottega.addons.cache.engine.recorder import (
    LatentQuestion,
    LatentRecorder,
    LatentReply,
    StartingPicture,
)
from bottega.addons.cache.skip_profile import count_words
from bottega.addons.cache.starts import ENTRY_PATTERN, format_start, prompt_digest, recorded_steps
from bottega.device.device import HostCopy
from bottega.engine.addon import JobAddOn
from bottega.engine.encode import Conditions
from bottega.engine.events import EngineRecord
from bottega.engine.job import EngineJob
from bottega.engine.request import Request
from bottega.engine.spans import TracedSpan
from bottega.engine.spec import ResolvedSpec
from bottega.errors import CacheEntryGone, NoCache
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheDecision, CacheQuestion, CacheStart, CacheStarts
from bottega.v1.generation_pb2 import CacheUse

if TYPE_CHECKING:
    from bottega.addons.cache.engine.addon import EngineCachedStarts

# A step that is made before a hit comes is wasted, and a store answers within a millisecond or two. So the turn that
# asks waits for this share of a step, but at most for so many seconds.
_ANSWER_STEPS = 0.1
_MAX_ANSWER_S = 0.02

# The stage of waiting for a latent that a picture must start from.
CACHE = "cache"


class JobCachedStarts(JobAddOn):
    """The cached latents of one job.

    Attributes:
        arriving: The prompt's embedding while it is copied from the device; None before and after.
        asked: The pending response of the cache; None before and after.
    """

    def __init__(self, addon: EngineCachedStarts, order: StartOrder) -> None:
        self.arriving: HostCopy | None = None
        self.asked: Future[LatentReply] | None = None
        self._addon = addon
        self._order = order
        self._pictures: list[StartingPicture] = []
        self._recorder: LatentRecorder | None = None
        self._key = self._plain_key = ""
        self._embedding = torch.empty(0)
        self._header: CacheQuestion | None = None
        self._decided = False
        self._since_s = 0.0
        self._answered_s: float | None = None
        self._reply: LatentReply | None = None
        self._unused: list[str] = []
        self._waited_s = 0.0

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Prepare the query. Raise InvalidRequest for a decision that does not fit the job."""
        spec = job.order.spec
        self._since_s = now_s
        self._pictures = [StartingPicture(request=request) for request in job.requests]
        self._pin(job, spec)
        self._key = self._addon.key_of(spec, self._order.tenant)
        if spec.loras and not any(part.changes_prompt for part in job.addons.values()):
            self._plain_key = self._addon.key_of(replace(spec, loras=()), self._order.tenant)
        # The embedding of a truncated prompt does not represent all of it.
        whole = all(cut.field != "prompt" for cut in conditions.truncations)
        recorder = LatentRecorder(spec, job.requests[0])
        if self._order.record and whole and recorder.keeps and not self._decided and self._order.pin is None:
            self._recorder = recorder
        images = self._images_to_ask(spec, whole=whole)
        if images or self._recorder is not None:
            self._header = self._question(spec, images)
            self.arriving = self._addon.model.runtime.to_host(conditions.summary.float())

    def update(self, now_s: float) -> None:
        """Send the query, read the response, and start pictures from latents in it, as soon as each is possible.

        Raises:
            CacheEntryGone: The latent that the request names no longer exists.
            NoCache: No cache can provide the latent that the request names.
        """
        if self.arriving is not None and self.arriving.ready:
            self._embedding, self.arriving = self.arriving.take(), None
            asked_s = time.monotonic()
            self._ask()
            now_s += time.monotonic() - asked_s  # Asking waits briefly for the answer.
        blocked = any(picture.blocked for picture in self._pictures)
        if self.asked is not None and self.asked.done():
            answer, self.asked = self.asked.result(), None
            self._answered_s, self._reply = now_s, answer
            self._take(answer)
        elif self.asked is not None and blocked and now_s - self._since_s > self._addon.timeout_s:
            self.asked.cancel()
            self.asked = None
            self._give_up(NoCache(f"the approximate cache did not answer within {self._addon.timeout_s:g} s"))
        self._start_pictures()
        if blocked and not any(picture.blocked for picture in self._pictures):
            self._waited_s = now_s - self._since_s

    def blocks(self, request: Request) -> bool:
        """Return whether a request must wait.

        All requests of the job wait until the query is sent. A request that must start from a certain latent waits
        until the latent has arrived, or until the job gives up waiting.
        """
        return self.arriving is not None or any(
            picture.blocked for picture in self._pictures if picture.request is request
        )

    def after_step(self, request: Request) -> None:
        if self._recorder is not None:
            self._recorder.after_step(request)

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """Add the pixels to the recording. Return None, because nothing is stored with the image."""
        if self._recorder is not None:
            self._recorder.after_decode(index, pixels)

    def spans(self) -> Iterator[TracedSpan]:
        """Yield the trace span from the query until its response was read, and the cache's own spans."""
        if self._answered_s is not None:
            hits = sum(picture.started is not None for picture in self._pictures)
            yield TracedSpan(
                name="look-up",
                track="approximate cache",
                begin_s=self._since_s,
                seconds=self._answered_s - self._since_s,
                facts={"pictures that start from a latent": str(hits)},
            )
        if self._reply is not None and self._reply.work is not None:
            yield from self._reply.work.spans("look-ups")

    def report(self, record: EngineRecord) -> None:
        """Add to the record which latents the pictures started from."""
        starts = [picture.started for picture in self._pictures if picture.started is not None]
        record.provenance.cached_starts.extend(starts)
        record.exact &= not starts
        if self._waited_s:
            record.seconds[CACHE] = self._waited_s

    def finish(self, record: EngineRecord) -> None:
        """Send the recording of this job to the cache, if the cache wants it."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or not recorder.confirmed:
            return
        recording = recorder.recording(
            record,
            key=self._key,
            plain_key=self._plain_key,
            model_hash=self._addon.model.digest,
            embedding=self._embedding,
        )
        if recording is not None:
            taken = self._addon.source.record(recording)
            self._addon.events["recordings" if taken else "dropped_recordings"] += 1

    def close(self) -> None:
        """Cancel the query if it is pending."""
        self.arriving = None
        if self.asked is not None:
            self.asked.cancel()
            self.asked = None

    def _ask(self) -> None:
        assert self._header is not None, "set by attach"
        if not _has_direction(self._embedding):
            self._recorder = None
            self._give_up(NoCache("the prompt's embedding is zero or not finite, so that no entry is similar to it"))
            return
        self.asked = self._addon.source.ask(LatentQuestion(header=self._header, embedding=self._embedding))
        if self._header.images and self._addon.source.linked:
            wait([self.asked], min(_MAX_ANSWER_S, _ANSWER_STEPS * self._addon.step_s))

    def _pin(self, job: EngineJob, spec: ResolvedSpec) -> None:
        """Record the latents that pictures must start from, and those from which pictures of a checkpoint started."""
        starts: list[CacheStart | None] = [None] * len(self._pictures)
        if kinds.CACHE in job.pinned:
            self._decided = True
            starts = read_decision(job.pinned[kinds.CACHE], spec)
        if (pin := self._order.pin) is not None and (starts[0] is None or _name(starts[0]) != _name(pin)):
            starts = [pin]
        for picture, start in zip(self._pictures, starts, strict=True):
            # A decision directly precedes its step, so that a picture that is beyond the step has started there.
            if start is not None and picture.request.step > picture.request.begin and picture.is_beyond(start):
                picture.mark_started(start, start.made_steps)
            else:
                picture.pinned = start
        self._update_decision()

    def _images_to_ask(self, spec: ResolvedSpec, *, whole: bool) -> int:
        """Return how many pictures may still start from a latent."""
        if self._decided or self._order.pin is not None:
            return sum(picture.blocked for picture in self._pictures)
        if not (self._order.read and whole):
            return 0
        last = max(recorded_steps(spec.num_inference_steps), default=0)
        return sum(not picture.is_beyond(CacheStart(step=last)) for picture in self._pictures)

    def _question(self, spec: ResolvedSpec, images: int) -> CacheQuestion:
        return CacheQuestion(
            key=self._key,
            model_hash=self._addon.model.digest,
            steps=spec.num_inference_steps,
            images=images,
            fidelity=self._order.fidelity,
            words=count_words(spec.prompt),
            step_s=self._addon.step_s,
            plain_key=self._plain_key,
            # If the step of the LoRAs is given, pictures have them from there on, and in no earlier step.
            plain_steps=spec.lora_bound if spec.lora_step is None else 0,
            job=self._order.job,
            repeated_steps=1 - self._addon.model.samplers.first_step_from(spec.sampler, 1),
            prompt_digest=prompt_digest(spec.prompt),
            seed=spec.seed,
            pinned=[picture.pinned for picture in self._pictures if picture.pinned is not None],
        )

    def _take(self, answer: LatentReply) -> None:
        """Assign the latents in a response to pictures."""
        if self._recorder is not None:
            self._recorder.confirm(wanted=answer.header.record)
        hits = []
        for hit in zip(answer.header.hits, answer.latents, strict=True):
            if self._fits(*hit):
                hits.append(hit)
            else:
                self._refuse(hit[0], "unfit_hits")
        if not any(picture.blocked for picture in self._pictures):
            for hit in hits:
                self._assign(hit)
            return
        for picture in self._pictures:
            if picture.pinned is not None:
                same = (hit for hit in hits if _name(hit[0]) == _name(picture.pinned))
                picture.hit = next(same, None)
        if any(picture.blocked and picture.hit is None for picture in self._pictures):
            unavailable = answer.header.outcome == CACHE_OUTCOME_UNAVAILABLE
            self._give_up(NoCache("the approximate cache cannot look for an entry now") if unavailable else None)

    def _assign(self, hit: tuple[CacheStart, Tensor]) -> None:
        """Assign a latent to the first picture that has none and could use it."""
        for picture in self._pictures:
            if picture.hit is None and not picture.is_beyond(hit[0]):
                picture.hit = hit
                return
        self._refuse(hit[0], "late_hits")

    def _refuse(self, start: CacheStart, why: str) -> None:
        """Count a latent from which no picture starts, and the reason to report to the cache."""
        self._addon.events[why] += 1
        self._unused.append(start.entry)

    def _fits(self, start: CacheStart, latent: Tensor) -> bool:
        """Return whether a picture of this job could start from the latent."""
        request = self._pictures[0].request
        return (
            ENTRY_PATTERN.fullmatch(start.entry) is not None
            and 0 < start.step < request.end
            and latent.shape == request.latent.shape[1:]
            and latent.dtype == request.latent.dtype
            and bool(torch.isfinite(latent).all())
        )

    def _start_pictures(self) -> None:
        """Start the pictures that have a latent and can use it now, and tell the cache how many steps that saved."""
        started = [start for picture in self._pictures if (start := self._start(picture)) is not None]
        skipped = sum(start.skipped_steps for start in started)
        self._addon.events["hits"] += len(started)
        self._addon.events["steps_skipped"] += skipped
        if started:
            self._update_decision()
        unused, self._unused = self._unused, []
        if self._reply is not None and self._header is not None and (started or unused):
            starts = CacheStarts(
                pictures=len(started),
                skipped_steps=skipped,
                key=self._header.key,
                prompt_digest=self._header.prompt_digest,
                unused=unused,
            )
            self._addon.source.report(self._reply, starts)

    def _start(self, picture: StartingPicture) -> CacheUse | None:
        """Start a picture from its latent. Return the start, or None if that is not possible now."""
        if picture.hit is None:
            return None
        start = picture.hit[0]
        outcome = picture.take_hit()
        if outcome in {"late_hits", "unfit_hits"}:
            self._refuse(start, outcome)
        if outcome == "hits" and picture is self._pictures[0]:
            self._recorder = None
        return picture.started

    def _give_up(self, why: NoCache | None) -> None:
        """Stop waiting for latents. Pictures that wait for one are drawn from noise.

        Raises:
            CacheEntryGone: The request itself names the latent, so that noise would draw another picture.
            NoCache: The same, where `why` is given: it is raised.
        """
        if self._order.pin is not None:
            name = _name(self._order.pin)
            message = f"the cached latent {name} does not exist any more, or was recorded with other settings"
            raise why or CacheEntryGone(message, metadata={"entry": name})
        for picture in self._pictures:
            if picture.hit is None and picture.started is None:
                picture.pinned = None
        self._update_decision()

    def _update_decision(self) -> None:
        """Set the decision: for each picture, the latent from which it started or must start."""
        starts = [
            CacheStart(
                entry=start.entry,
                step=start.step,
                similarity=started.similarity,
                without_loras=started.without_loras,
                made_steps=started.from_step - started.skipped_steps,
            )
            if (started := picture.started) is not None and (start := picture.start) is not None
            else (picture.pinned if self._decided else None) or CacheStart()
            for picture in self._pictures
        ]
        if self._decided or any(start.entry for start in starts):
            self.decision = CacheDecision(starts=starts).SerializeToString()


def _has_direction(embedding: Tensor) -> bool:
    """Return whether the embedding's norm is positive and finite in float32, which a large LoRA scale can prevent."""
    length = float(torch.linalg.vector_norm(embedding))
    return math.isfinite(length) and length > 0.0


def _name(start: CacheStart) -> str:
    return format_start(start.entry, start.step)
