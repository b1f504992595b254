"""Cached latents as an add-on of the engine: asked for when a prompt is encoded, taken if they come in time.

Nobody waits for what is only similar, but until the prompt's embedding has come from the device, while others' steps go
on, and for the moment in which a store answers, a tenth of a step at most: a job begins from noise, and its pictures go
on from latents that come before they have made as many steps themselves. What a request names itself is waited for, and
so is what an earlier attempt has decided, so that a picture is the same in all attempts.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace

import torch
from torch import Tensor

from bottega import kinds, rules
from bottega.diffusion.cached_starts.key import has_key, start_key
from bottega.diffusion.cached_starts.order import PIN_FIELD, StartOrder, read_decision, read_order
from bottega.diffusion.cached_starts.picture import StartingPicture
from bottega.diffusion.cached_starts.recorder import LatentRecorder
from bottega.diffusion.cached_starts.source import LatentQuestion, LatentReply, LatentSource
from bottega.diffusion.device.device import HostCopy
from bottega.diffusion.engine.addon import EngineAddOn, JobAddOn
from bottega.diffusion.engine.encode import Conditions
from bottega.diffusion.engine.events import CachedStart, EngineRecord
from bottega.diffusion.engine.job import EngineJob, EngineOrder
from bottega.diffusion.engine.request import Request
from bottega.diffusion.engine.spans import TracedSpan
from bottega.diffusion.model.model import Model
from bottega.diffusion.rows import Row
from bottega.diffusion.spec import ResolvedSpec
from bottega.errors import CacheEntryGone, NoCache, Violation
from bottega.latents import ENTRY_PATTERN, format_start, prompt_digest, recorded_steps
from bottega.planning import count_words
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheDecision, CacheQuestion, CacheStart, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress

EVENTS = ("hits", "steps_skipped", "late_hits", "unfit_hits", "recordings", "dropped_recordings")

# A first step that is made before a hit comes is made in vain, and a store answers within a millisecond or two: so the
# turn that asks waits for this share of a step, and for so many seconds at most.
_ANSWER_STEPS = 0.1
_MOST_ANSWER_S = 0.02

# The stage of waiting for a latent that has to be started from.
CACHE = "cache"


class EngineCachedStarts(EngineAddOn):
    """source: brings latents, and takes recordings. timeout_s: how long what has to be started from may take.

    events: see `counts`. step_s: of the last step of any job; 0 before the first one.
    """

    kind = kinds.CACHE

    def __init__(
        self,
        model: Model,
        source: LatentSource,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self.model = model
        self.source = source
        self.timeout_s = timeout_s
        self.events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self.step_s = 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """hits: pictures that started from a latent, which has saved steps_skipped steps. late_hits, unfit_hits: that
        came too late, or did not fit. recordings, dropped_recordings: that there was room for, or was none.
        """
        return self.events

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """The stores."""
        self.source.set_stores(services)

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Raises InvalidRequest for an order that nobody could carry out."""
        said = read_order(order)
        if said is None and kinds.CACHE not in order.decisions:
            return None
        said = said or StartOrder()
        if not has_key(order.spec):
            if said.pin is not None:
                rule = "must not be there: a picture like this never starts from a cached latent"
                rules.refuse([Violation(field=PIN_FIELD, description=rule)])
            return None
        if not (said.read or said.record or said.pin or kinds.CACHE in order.decisions):
            return None
        return JobCachedStarts(self, said)

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Returns when an answer is here, or after the timeout; where an embedding is on its way, with that."""
        for part in parts:
            if isinstance(part, JobCachedStarts) and part.arriving is not None:
                part.arriving.take()
                return
        asked = [part.asked for part in parts if isinstance(part, JobCachedStarts) and part.asked is not None]
        wait(asked, timeout_s, FIRST_COMPLETED)

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None) -> bool:
        """Learns what a step takes."""
        self.step_s = seconds
        return True

    def key_of(self, spec: ResolvedSpec, tenant: str) -> str:
        """What has to be equal for one job to start from another's latents."""
        return start_key(spec, model_hash=self.model.digest, dtype=self.model.dtype_name, tenant=tenant)


class JobCachedStarts(JobAddOn):
    """The pictures of one job. arriving: the prompt's embedding, on its way from the device.

    asked: what the store was asked, as long as the answer was not taken in.
    """

    def __init__(self, addon: EngineCachedStarts, said: StartOrder) -> None:
        self.arriving: HostCopy | None = None
        self.asked: Future[LatentReply] | None = None
        self._addon = addon
        self._said = said
        self._pictures: list[StartingPicture] = []
        self._recorder: LatentRecorder | None = None
        self._key = self._plain_key = ""
        self._embedding = torch.empty(0)
        self._header: CacheQuestion | None = None
        self._decided = False
        self._decision: bytes | None = None
        self._since_s = 0.0
        self._answered_s: float | None = None
        self._reply: LatentReply | None = None
        self._unused: list[str] = []
        self._waited_s = 0.0

    @property
    def waiting(self) -> bool:
        """Whether a picture waits for the answer, or for the question."""
        return self.arriving is not None or (self.asked is not None and any(each.blocked for each in self._pictures))

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Prepares the question. Raises InvalidRequest for a decision of another job."""
        spec = job.order.spec
        self._since_s = now_s
        self._pictures = [StartingPicture(request=request) for request in job.requests]
        self._pin(job, spec)
        self._key = self._addon.key_of(spec, self._said.tenant)
        if spec.loras and not any(part.changes_prompt for part in job.addons.values()):
            self._plain_key = self._addon.key_of(replace(spec, loras=()), self._said.tenant)
        # What the encoder has not read, its embedding does not show.
        whole = "prompt" not in conditions.truncations
        recorder = LatentRecorder(spec, job.requests[0])
        if self._said.record and whole and recorder.keeps and not self._decided and self._said.pin is None:
            self._recorder = recorder
        images = self._images_to_ask(spec, whole=whole)
        if images or self._recorder is not None:
            self._header = self._question(spec, images)
            self.arriving = self._addon.model.runtime.to_host(conditions.conditional.pooled.float())

    def update(self, now_s: float) -> None:
        """Asks, takes in the answer, and lets those pictures start whose time has come.

        Raises CacheEntryGone, or NoCache, where what the request names itself cannot be had.
        """
        if self.arriving is not None and self.arriving.ready:
            self._embedding, self.arriving = self.arriving.take(), None
            asked_s = time.monotonic()
            self._ask()
            now_s += time.monotonic() - asked_s  # it waits for an answer that comes soon
        blocked = any(picture.blocked for picture in self._pictures)
        if self.asked is not None and self.asked.done():
            answer, self.asked = self.asked.result(), None
            self._answered_s, self._reply = now_s, answer
            self._take(answer)
        elif self.asked is not None and blocked and now_s - self._since_s > self._addon.timeout_s:
            self.asked.cancel()
            self.asked = None
            self._give_up(NoCache(f"the approximate cache said nothing within {self._addon.timeout_s:g} s"))
        self._start_pictures()
        if blocked and not any(picture.blocked for picture in self._pictures):
            self._waited_s = now_s - self._since_s

    def blocks(self, request: Request) -> bool:
        """All, until the question is asked; then those that have to start from a certain latent, until it is here or is
        not waited for any more."""
        return self.arriving is not None or any(
            picture.blocked for picture in self._pictures if picture.request is request
        )

    @property
    def decision(self) -> bytes | None:
        """What each picture starts from, as a CacheDecision."""
        return self._decision

    def after_step(self, request: Request) -> None:
        if self._recorder is not None:
            self._recorder.after_step(request)

    def after_decode(self, index: int, pixels: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.after_decode(index, pixels)

    def spans(self) -> Iterator[TracedSpan]:
        """The question, until its answer was looked at, and what the store did meanwhile."""
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

    def report(self, record: EngineRecord) -> EngineRecord:
        """What its pictures started from."""
        starts = tuple(picture.started for picture in self._pictures if picture.started is not None)
        if self._waited_s:
            record = replace(record, seconds={**record.seconds, CACHE: self._waited_s})
        return replace(record, cached_starts=starts, exact=record.exact and not starts)

    def finish(self, record: EngineRecord) -> None:
        """Hands over what later jobs may start from, where the store has said that it wants it."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or not recorder.confirmed:
            return
        recording = recorder.recording(
            record, key=self._key, model_hash=self._addon.model.digest, embedding=self._embedding
        )
        if recording is not None:
            taken = self._addon.source.record(recording)
            self._addon.events["recordings" if taken else "dropped_recordings"] += 1

    def close(self) -> None:
        """Nobody needs the answer any more."""
        self.arriving = None
        if self.asked is not None:
            self.asked.cancel()
            self.asked = None

    def _ask(self) -> None:
        """With the embedding, which is here."""
        assert self._header is not None, "what is asked is known before"
        if not _has_direction(self._embedding):
            self._recorder = None
            self._give_up(NoCache("the prompt's embedding is similar to nothing: it is zero, or not finite"))
            return
        self.asked = self._addon.source.ask(LatentQuestion(header=self._header, embedding=self._embedding))
        if self._header.images and self._addon.source.linked:
            wait([self.asked], min(_MOST_ANSWER_S, _ANSWER_STEPS * self._addon.step_s))

    def _pin(self, job: EngineJob, spec: ResolvedSpec) -> None:
        """Notes what pictures have to start from, and what those of a checkpoint have started from."""
        starts: list[CacheStart | None] = [None] * len(self._pictures)
        if kinds.CACHE in job.pinned:
            self._decided = True
            starts = read_decision(job.pinned[kinds.CACHE], spec)
        if (pin := self._said.pin) is not None and (starts[0] is None or _name(starts[0]) != _name(pin)):
            starts = [pin]
        for picture, start in zip(self._pictures, starts, strict=True):
            # Between a decision and its step there is no other one, so that who has made it has started there.
            if start is not None and picture.request.step > picture.request.begin and picture.is_beyond(start):
                picture.mark_started(start, start.made_steps)
            else:
                picture.pinned = start
        self._update_decision()

    def _images_to_ask(self, spec: ResolvedSpec, *, whole: bool) -> int:
        """How many pictures may still start from a latent."""
        if self._decided or self._said.pin is not None:
            return sum(picture.blocked for picture in self._pictures)
        if not (self._said.read and whole):
            return 0
        last = max(recorded_steps(spec.num_inference_steps), default=0)
        return sum(not picture.is_beyond(CacheStart(step=last)) for picture in self._pictures)

    def _question(self, spec: ResolvedSpec, images: int) -> CacheQuestion:
        return CacheQuestion(
            key=self._key,
            model_hash=self._addon.model.digest,
            steps=spec.num_inference_steps,
            images=images,
            fidelity=self._said.fidelity,
            words=count_words(spec.prompt),
            step_s=self._addon.step_s,
            plain_key=self._plain_key,
            # Where the step of the LoRAs is given, pictures have them from there on, and in no step before.
            plain_steps=spec.lora_bound if spec.lora_step is None else 0,
            job=self._said.job,
            repeated_steps=1 - self._addon.model.samplers.first_step_from(spec.sampler, 1),
            prompt_digest=prompt_digest(spec.prompt),
            seed=spec.seed,
            pinned=[picture.pinned for picture in self._pictures if picture.pinned is not None],
        )

    def _take(self, answer: LatentReply) -> None:
        """Gives each picture its hit."""
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
        """Gives a hit to the first picture that has none and could use it."""
        for picture in self._pictures:
            if picture.hit is None and not picture.is_beyond(hit[0]):
                picture.hit = hit
                return
        self._refuse(hit[0], "late_hits")

    def _refuse(self, start: CacheStart, why: str) -> None:
        """Count a hit that no picture starts from, and note it for the store."""
        self._addon.events[why] += 1
        self._unused.append(start.entry)

    def _fits(self, start: CacheStart, latent: Tensor) -> bool:
        """Whether a picture of this job could start there."""
        request = self._pictures[0].request
        return (
            ENTRY_PATTERN.fullmatch(start.entry) is not None
            and 0 < start.step < request.end
            and latent.shape == request.latent.shape[1:]
            and latent.dtype == request.latent.dtype
            and bool(torch.isfinite(latent).all())
        )

    def _start_pictures(self) -> None:
        """Start the pictures that have a hit and can use it now, and tell the store how many steps that saved."""
        started = [start for picture in self._pictures if (start := self._start(picture)) is not None]
        skipped = sum(start.skipped_steps for start in started)
        self._addon.events["hits"] += len(started)
        self._addon.events["steps_skipped"] += skipped
        if started:
            self._update_decision()
        unused, self._unused = self._unused, []
        if self._reply is not None and self._header is not None and (started or unused):
            told = CacheStarts(
                pictures=len(started),
                skipped_steps=skipped,
                key=self._header.key,
                prompt_digest=self._header.prompt_digest,
                unused=unused,
            )
            self._addon.source.report(self._reply, told)

    def _start(self, picture: StartingPicture) -> CachedStart | None:
        """Start a picture from its hit if it can do so now; return the start, or None."""
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
        """What pictures have to start from, and does not come, is not waited for: they are drawn from noise.

        Raises CacheEntryGone, or `why`, where the request names it itself: it would be another picture.
        """
        if self._said.pin is not None:
            name = _name(self._said.pin)
            said = f"the cached latent {name} is gone, or was recorded for another kind of request"
            raise why or CacheEntryGone(said, metadata={"entry": name})
        for picture in self._pictures:
            if picture.hit is None and picture.started is None:
                picture.pinned = None
        self._update_decision()

    def _update_decision(self) -> None:
        """Notes what each picture has started from, or still has to by an earlier attempt's decision."""
        starts = [
            CacheStart(
                entry=started.entry,
                step=started.step,
                similarity=started.similarity,
                without_loras=started.without_loras,
                made_steps=started.from_step - started.skipped_steps,
            )
            if (started := picture.started) is not None
            else (picture.pinned if self._decided else None) or CacheStart()
            for picture in self._pictures
        ]
        if self._decided or any(start.entry for start in starts):
            self._decision = CacheDecision(starts=starts).SerializeToString()


def _has_direction(embedding: Tensor) -> bool:
    """Whether it has a cosine with others, in single precision. A LoRA's scale can make it as large as one likes."""
    length = float(torch.linalg.vector_norm(embedding))
    return math.isfinite(length) and length > 0.0


def _name(start: CacheStart) -> str:
    return format_start(start.entry, start.step)
