"""The engine's ControlNets on servers: requests steps, waits for residuals, and passes them to the engine.

If a server is lost, its steps are requested from the next one after that has loaded the ControlNet. Until then only
requests that use it wait. Without any server the request fails: an image is never drawn without its controls.
Everything here runs in the engine's thread. Connections have threads of their own, and wake the engine when a message
arrives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bottega.addons.controlnets.engine import ControlLayout, LocalControlNets, residual_at
from bottega.addons.controlnets.engine.messages import ControlStep, StepEntry, residuals_layout
from bottega.addons.controlnets.engine.provider import ControlInput, ControlRecord, half_of_residuals
from bottega.addons.controlnets.planning import pipelines
from bottega.addons.controlnets.worker.server_link import ControlLinkSettings, ServerLink, smoothed
from bottega.addons.controlnets.worker.session_manager import PlacedSession, SessionManager
from bottega.addons.controlnets.worker.step_result import StepResult
from bottega.device.heartbeat import Heartbeat
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.model import Model
from bottega.model.rows import Half, Row
from bottega.transport import LinkCounters, OfferSource

# How often a wait beats and checks whether a ControlNet was loaded in this process.
_LOOK_S = 0.1


class StalenessPolicy:
    """Decides whether a request waits for each step's residuals or uses those of the step before.

    It measures how long a step and its first half, up to the first residual, take, and decides with
    `planning.pipelines`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_s: float | None = None
        self._encoder_s = 0.0
        self._step_s = 0.0
        self._needed = True

    def on_turn(self) -> None:
        """Record that a forward pass of the engine has begun."""
        now_s = self._clock()
        if self._asked_s is not None:
            self._step_s = smoothed(self._step_s, now_s - self._asked_s)
        self._asked_s, self._needed = now_s, False

    def on_idle(self) -> None:
        """Record that the engine is idle, so that the time until the next forward pass does not count as a step."""
        self._asked_s = None

    def on_residuals_needed(self) -> None:
        """Record that the forward pass has reached the first block that needs residuals."""
        if not self._needed and self._asked_s is not None:
            self._needed = True
            self._encoder_s = smoothed(self._encoder_s, self._clock() - self._asked_s)

    def allows(self, control: ControlInput, *, answer_s: float, transfer_s: float) -> bool:
        """Return whether steps with this ControlNet may use the residuals of the step before instead of waiting.

        Args:
            answer_s: See ServerLink.
            transfer_s: See ServerLink.
        """
        similarity = control.hosts.similarity
        if not control.may_be_stale or similarity is None:
            return False
        return pipelines(
            similarity, answer_s=answer_s, transfer_s=transfer_s, encoder_s=self._encoder_s, step_s=self._step_s
        )


class RemoteControlNets:
    """A ControlNetProvider whose ControlNets run on servers, or in this process where no server runs them.

    Args:
        base: Layout that ControlNets must have to fit the model.
        local: The ControlNets of this process.
        counters: Metrics of all connections.
        staleness: Decides which requests use residuals of the step before.
        heartbeat: Shows that the engine is alive while a forward pass waits.
    """

    def __init__(
        self,
        *,
        base: ControlLayout,
        model: Model,
        offers: OfferSource,
        local: LocalControlNets | None = None,
        settings: ControlLinkSettings | None = None,
        counters: LinkCounters | None = None,
        staleness: StalenessPolicy | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._base = base
        self._backbone = model.backbone
        self._dtype = model.dtype
        self._device = model.runtime
        self._local = local
        self._manager = SessionManager(
            base=base,
            dtype=model.dtype,
            offers=offers,
            local=local,
            settings=settings or ControlLinkSettings(),
            counters=counters or LinkCounters(),
        )
        self._staleness = staleness or StalenessPolicy()
        self._heartbeat = heartbeat or Heartbeat()
        self._rows: list[Row] = []
        self._local_rows: dict[Row, Row] = {}
        self._taken: dict[Row, set[StepResult]] = {}  # results of this turn that the row has used

    @property
    def counters(self) -> LinkCounters:
        return self._manager.counters

    @property
    def servers(self) -> list[str]:
        """Names of the connected servers."""
        return [link.store.name for link in self._manager.links if link.lost is None]

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        sessions = [PlacedSession(control=control) for control in controls]
        self._manager.assign(sessions)
        errors = [session.error for session in sessions if session.error is not None]
        if errors:
            self.close(sessions)
            raise errors[0]
        return tuple(sessions)

    def opened(self, handles: Sequence[Hashable]) -> bool:
        self._manager.take_in_news()
        sessions = [_session(handle) for handle in handles]
        for session in sessions:
            if session.error is not None:
                raise session.error
        return all(self._manager.is_open(session) for session in sessions)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        pending = [_session(handle) for handle in handles if not self._manager.is_open(_session(handle))]
        while (left_s := until - time.monotonic()) > 0:
            seen = self._manager.changes.count
            self._manager.take_in_news()
            if any(session.error is not None or self._manager.is_open(session) for session in pending):
                return
            self._manager.changes.wait(seen, min(left_s, _LOOK_S))

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        sessions = [_session(handle) for handle in handles]
        self._staleness.on_idle()
        self._manager.release(sessions)
        self._rows = [row for row in self._rows if not set(row.controls) & set(sessions)]
        return tuple(session.record for session in sessions)

    def ask(self, rows: list[Row]) -> None:
        self._staleness.on_turn()
        self._rows, self._local_rows, self._taken = rows, {}, {}
        for link in self._manager.links:
            link.spare_slots()
        self._manager.take_in_news()
        self._send(rows)
        self._compute()

    def ask_ahead(self, rows: list[Row]) -> None:
        """Request residuals of the next step early, from servers with enough free slots.

        A response that is requested early occupies its slot for longer, and a server without a free slot cannot respond
        at all.
        """
        for link in self._manager.links:
            link.spare_slots()
        self._manager.take_in_news()
        self._send(rows, ahead=True)

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        self._staleness.on_residuals_needed()
        self._manager.take_in_news()
        return self._ready(row, points)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        began = time.monotonic()
        missing = {session for row in rows for session in _sessions(row) if not self._has(session, row, points)}
        try:
            while (left_s := began + timeout_s - time.monotonic()) > 0:
                seen = self._manager.changes.count
                self._manager.take_in_news()
                self._send(self._rows)
                self._compute()
                if any(self._ready(row, points) or self._is_void(row) for row in rows):
                    return
                self._heartbeat.beat()
                self._manager.changes.wait(seen, min(left_s, _LOOK_S))
        finally:
            for session in missing:
                session.waited_s += time.monotonic() - began

    def is_void(self, row: Row) -> bool:
        self._manager.take_in_news()
        return self._is_void(row)

    def take(self, row: Row, point: int) -> Sequence[Tensor | None]:
        local: Sequence[Tensor | None] = ()
        if self._local is not None and row in self._local_rows:
            local = self._local.take(self._local_rows[row], point)
        here = iter(local)
        addends: list[Tensor | None] = []
        for session in _sessions(row):
            if session.local is not None:
                addends.append(next(here))
                continue
            answer = session.answer(row)
            assert answer is not None, "the engine takes residuals that are ready"
            result, place = answer
            self._taken.setdefault(row, set()).add(result)
            found = [result.at(index, place) for index in self._residuals(session, (point,))]
            addends.append(self._device.to_device(found[0], self._dtype) if found else None)
        return addends

    def is_shared(self, row: Row) -> bool:
        here = self._local_rows.get(row)
        if self._local is not None and here is not None and self._local.is_shared(here):
            return True
        return any(result.shared for result in self._taken.get(row, ()))

    def stop(self) -> None:
        for link in self._manager.links:
            link.end()

    def _ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return all(self._has(session, row, points) for session in _sessions(row))

    def _has(self, session: PlacedSession, row: Row, points: tuple[int, ...]) -> bool:
        if session.local is not None:
            here = self._local_rows.get(row)
            return self._local is not None and here is not None and self._local.ready(here, points)
        answer = session.answer(row)
        return answer is not None and answer[0].has(self._residuals(session, points))

    def _residuals(self, session: PlacedSession, points: tuple[int, ...]) -> list[int]:
        """Return the indexes of a session's residuals that are added at these points; a server computes them."""
        facts = session.opened
        assert facts is not None, "steps are only requested for opened sessions"
        indexes = (residual_at(self._backbone, point, facts.residuals, facts.singles) for point in points)
        return [index for index in indexes if index is not None]

    def _is_void(self, row: Row) -> bool:
        if any(result.void for result in self._taken.get(row, ())):
            return True
        return not all(self._manager.is_open(session) for session in _sessions(row))

    def _send(self, rows: Sequence[Row], *, ahead: bool = False) -> None:
        """Request the residuals that rows need and that were not requested: one message for each server and group.

        Samples of one message have one shape, so ControlNets that read tokens, and sizes, get messages of their own.
        """
        wanted: dict[tuple[ServerLink, bool, torch.Size], dict[_RowKey, tuple[Row, PlacedSession]]] = {}
        for row in rows:
            for session in _sessions(row):
                if session.lease is not None and session.opened is not None and not session.asked(row):
                    key = session.lease.link, session.opened.reads_tokens, row.sample.shape
                    # The conditional and unconditional rows may use the same residuals (see `half_of_residuals`). The
                    # key then requests them once.
                    one = row.owner, half_of_residuals(session.control, row), session
                    wanted.setdefault(key, {})[one] = row, session
        for (link, _, shape), found in wanted.items():
            # Rows with more residuals come first, so that a residual of fewer rows is that of the first rows.
            pairs = sorted(found.values(), key=lambda pair: -_count(pair[1]))
            shapes = self._shapes(pairs, shape[1], shape[2])
            row_bytes = sum(math.prod(point) for point in shapes) * self._dtype.itemsize
            most = max(1, link.slot_bytes // (row_bytes + 64 * len(shapes)) - 1)
            for start in range(0, len(pairs), most):
                if ahead and not link.has_slots_to_spare:
                    break
                part = pairs[start : start + most]
                self._ask_for(link, part, self._shapes(part, shape[1], shape[2]))

    def _shapes(
        self, pairs: Sequence[tuple[Row, PlacedSession]], height: int, width: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the residuals of the first of these rows, which has most of them."""
        shapes = self._base.shapes(height, width)
        # All residuals of a transformer have one shape; a ControlNet for a UNet has as many as the UNet has points.
        return (shapes[0],) * _count(pairs[0][1]) if self._base.patch else tuple(shapes)

    def _ask_for(
        self, link: ServerLink, pairs: Sequence[tuple[Row, PlacedSession]], shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        samples = {id(row.sample): row for row, _ in pairs}  # both halves of a request share one sample
        places = {key: place for place, key in enumerate(samples)}
        counts = tuple(_count(session) for _, session in pairs) if self._base.patch else ()
        layout = residuals_layout(len(pairs), shapes, self._dtype, counts=counts)
        result = StepResult(layout, len(shapes))
        for place, (row, session) in enumerate(pairs):
            session.pipelined = session.pipelined or self._staleness.allows(
                session.control, answer_s=link.answer_s, transfer_s=link.transfer_s
            )
            session.expect(row, result, place)
        latents = torch.stack([row.sample for row in samples.values()])
        opened = pairs[0][1].opened
        step = ControlStep(
            number=link.number(),
            entries=tuple(
                StepEntry(
                    session=session.number,
                    half=half_of_residuals(session.control, row),
                    sample=places[id(row.sample)],
                )
                for row, session in pairs
            ),
            samples=self._tokens(latents) if opened is not None and opened.reads_tokens else latents,
            timesteps=torch.stack([row.timestep.float() for row in samples.values()]),
            alone=all(row.alone for row, _ in pairs),
        )
        link.ask(step, result)

    @torch.inference_mode()
    def _tokens(self, latents: Tensor) -> Tensor:
        assert isinstance(self._backbone, Sd3Backbone), "a ControlNet that reads tokens fits no other model"
        return self._backbone.tokens(latents)

    def _compute(self) -> None:
        """Compute the residuals of sessions that run in this process."""
        if self._local is None:
            return
        rows = {}
        for row in self._rows:
            here = [session for session in _sessions(row) if session.local is not None]
            if here and all(self._manager.is_open(session) for session in here):
                rows[row] = replace(row, controls=tuple(session.local for session in here))
        if {row: here.controls for row, here in rows.items()} != {
            row: here.controls for row, here in self._local_rows.items()
        }:
            self._local_rows = rows
            self._local.ask(list(rows.values()))


_RowKey = tuple[Hashable, Half, PlacedSession]
"""A row's owner, the half (conditional or not) whose residuals it uses, and the session."""


def _count(session: PlacedSession) -> int:
    """Return the number of residuals of a session on a server."""
    return session.opened.residuals if session.opened is not None else 0


def _sessions(row: Row) -> list[PlacedSession]:
    return [_session(handle) for handle in row.controls]


def _session(handle: Hashable) -> PlacedSession:
    assert isinstance(handle, PlacedSession), "`open` made every handle"
    return handle
