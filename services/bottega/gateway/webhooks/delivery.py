"""The delivery of webhook events: signed POSTs, repeated until the receiver accepts them or they are given up.

    state      event                                     next state
    waiting    it is due, and the limits allow it        in flight
    in flight  the receiver answers 2xx                  delivered: removed from the outbox
    in flight  any other answer, or none in time         waiting, with exponential back-off and jitter
    in flight  the same, after `give_up_s`; or 410 Gone  dead: kept for an operator, who may replay it
    new        there is no room                          dead, until there is room
    dead       replayed, or more than `max_dead`         waiting; or removed and counted as dropped

Each change is durable before it counts. If the gateway dies between the receiver's answer and the removal, the event is
delivered again with the same ID: at least once. Signatures are those of https://www.standardwebhooks.com.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import itertools
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from standardwebhooks import Webhook

from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import AddressRefused, BottegaError, ConfigError, DataLoss, MethodNotServed
from bottega.gateway.config import WebhooksConfig
from bottega.gateway.jobs.conversion import version
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import OutboxEvent, OutboxPlace
from bottega.gateway.metrics import WebhookMetrics
from bottega.gateway.tenants import TenantTerms
from bottega.gateway.webhooks.lanes import DeliveryLanes, DeliveryLimits, place_of

if TYPE_CHECKING:
    import httpx

# Seconds between two reads of new events if nobody says that there are any: their caller may have left too early.
_LOOK_S = 15.0
_READ_AT_ONCE = 1000
_READMITTED_AT_ONCE = 32
# Each replay is a durable write.
_REPLAYED_AT_ONCE = 1000
# Seconds after which an event whose row could not be read is tried again.
_UNREAD_S = 30.0
# Seconds for deliveries in flight when the gateway stops; others are repeated after the restart.
_STOP_S = 1.0
_MAX_ERROR_CHARACTERS = 200
_GONE = 410

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why a delivery failed."""

    text: str
    final: bool = False
    """Whether the receiver wants no more tries."""
    retry_after_s: float = 0.0
    """Seconds for which the receiver wants to be left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEvents:
    """The result of a replay."""

    replayed: int
    """Number of events that are delivered again."""
    damaged: int
    """Number of events that were dropped, because their rows are damaged."""
    left: int = 0
    """Number of events that are still given up, because one call replays a bounded number."""


class WebhookDelivery:
    """Delivers the events in the outbox of a gateway. `start` it when the storage is open, and `stop` it before.

    Args:
        config: The configuration of webhooks.
        storage: The storage with the outbox.
        terms: The tenants' secrets.
        metrics: Counts deliveries.
        clock: Clock for signatures.
    """

    def __init__(
        self, *, config: WebhooksConfig, storage: Storage, terms: TenantTerms, metrics: WebhookMetrics, clock: Clock
    ) -> None:
        self._config = config
        self._storage = storage
        self._outbox = storage.jobs.outbox
        self._terms = terms
        self._metrics = metrics
        self._clock = clock
        self._lanes = DeliveryLanes(
            DeliveryLimits(
                total=config.max_deliveries,
                per_tenant=config.max_deliveries_per_tenant,
                per_host=config.max_deliveries_per_host,
            )
        )
        self._dead: dict[str, OrderedDict[str, None]] = {}
        self._left_out: dict[str, OrderedDict[str, None]] = {}
        """Those of the dead events that found no room."""
        self._newest = 0
        self._changed = asyncio.Event()
        self._scheduling = BackgroundTasks("scheduling of webhooks")
        self._delivering = BackgroundTasks("delivery of webhooks")
        self._client: httpx.AsyncClient | None = None
        metrics.waiting.set_function(lambda: len(self._lanes))
        metrics.dead.set_function(lambda: sum(map(len, tuple(self._dead.values()))))

    async def start(self) -> None:
        """Start to deliver, if the configuration allows any host."""
        if self._config.allows_any:
            self._client = await asyncio.to_thread(self._new_client)
            self._scheduling.start(self._run())

    async def stop(self) -> None:
        """Stop. Deliveries that do not end soon are repeated after the next start."""
        await self._scheduling.cancel()
        await self._delivering.join(_STOP_S)
        await self._delivering.cancel()
        if self._client is not None:
            await self._client.aclose()

    def look(self) -> None:
        """Note that there may be new events."""
        self._changed.set()

    def has_room(self, tenant: str) -> bool:
        """Return whether another event of a tenant may wait; others are left out. It may be some events off."""
        return (
            len(self._lanes) < self._config.max_waiting
            and self._lanes.waiting_of(tenant) < self._config.max_waiting_per_tenant
        )

    async def page(
        self, *, tenant: str | None, dead: bool | None, before: int | None, size: int
    ) -> list[tuple[int, OutboxEvent]]:
        """Return a page of undelivered events; see Outbox.page."""
        return await self._outbox.page(tenant=tenant, dead=dead, before=before, size=size)

    async def replay(self, event_ids: Sequence[str]) -> ReplayedEvents:
        """Make events due now, with a new time in which they are tried. Damaged ones are dropped."""
        if self._client is None:
            raise MethodNotServed("this gateway delivers no webhooks: webhooks.hosts of its configuration is empty")
        replayed = damaged = 0
        for event_id in event_ids:
            if self._lanes.is_in_flight(event_id):
                continue
            try:
                event = await self._outbox.get(event_id)
            except DataLoss:
                await self._drop_damaged(event_id)
                damaged += 1
                continue
            if event is None:
                continue
            now = self._storage.steady()
            again = dataclasses.replace(event, dead=False, attempts=0, tried_since_steady=now, due_steady=now)
            if await self._outbox.replace(again):
                self._forget_dead(event.tenant, event_id)
                self._lanes.add(place_of(again))
                replayed += 1
        self.look()
        return ReplayedEvents(replayed=replayed, damaged=damaged)

    async def replay_dead(self, tenant: str | None) -> ReplayedEvents:
        """Replay events of a tenant that were given up, oldest first; None for those of all tenants."""
        chosen = tuple(self._dead) if tenant is None else (tenant,)
        dead = [event_id for name in chosen for event_id in self._dead.get(name, ())]
        replayed = await self.replay(dead[:_REPLAYED_AT_ONCE])
        return dataclasses.replace(replayed, left=sum(len(self._dead.get(name, ())) for name in chosen))

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._read_new()
                await self._readmit()
            except BottegaError as error:
                self._storage.report_failure(error)  # which logs it; it is read again at the next look
            except Exception:  # noqa: BLE001 - the boundary of the task: without it nothing would be delivered any more
                _log.exception("new webhooks could not be read; it is tried again")
            while (place := self._lanes.begin(self._storage.steady())) is not None:
                self._delivering.start(self._deliver(place))
            self._metrics.oldest_wall = self._lanes.oldest_wall()
            next_due = self._lanes.next_due()
            wait_s = _LOOK_S if next_due is None else min(_LOOK_S, max(0.0, next_due - self._storage.steady()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _read_new(self) -> None:
        places = None
        at_start = not self._newest
        left_out = Counter[str]()
        while places is None or len(places) == _READ_AT_ONCE:
            places = await self._outbox.places(after=self._newest, limit=_READ_AT_ONCE)
            for place in places:
                self._newest = place.number
                if not place.dead:
                    self._lanes.add(place)
                    continue
                if not place.attempts:
                    self._left_out.setdefault(place.tenant, OrderedDict())[place.event_id] = None
                    left_out[place.tenant] += not at_start
                await self._note_dead(place.tenant, place.event_id)
        for tenant, count in (+left_out).items():
            self._metrics.given_up.inc(count)
            why = "webhooks of a tenant wait until others are delivered, because the outbox has no room"
            _log.warning(why, extra={"tenant": tenant, "events": count})

    async def _readmit(self) -> None:
        """Let events wait that found no room before, as far as there is room now."""
        chosen = [
            (tenant, event_id)
            for tenant, events in self._left_out.items()
            if self.has_room(tenant)
            for event_id in itertools.islice(events, _READMITTED_AT_ONCE)
        ]
        # Each is a durable write, for which new deliveries wait; the others follow at the next turn of the task.
        for tenant, event_id in chosen[:_READMITTED_AT_ONCE]:
            if self.has_room(tenant):
                await self.replay([event_id])
                self._forget_dead(tenant, event_id)

    async def _deliver(self, place: OutboxPlace) -> None:
        """Deliver an event once, and store what came of it."""
        after: OutboxPlace | None = dataclasses.replace(place, due_steady=self._storage.steady() + _UNREAD_S)
        failed = True
        try:
            event = await self._outbox.get(place.event_id)
            refusal = await self._post(event) if event is not None else None
            failed = refusal is not None
            after = None if event is None else await self._settle(event, refusal)
        except DataLoss:
            after = None
            await self._drop_damaged(place.event_id)
        except BottegaError as error:
            self._storage.report_failure(error)
        finally:
            self._lanes.end(place, failed=failed)
            if after is not None:
                self._lanes.add(after)
            self.look()

    async def _settle(self, event: OutboxEvent, refusal: _Refusal | None) -> OutboxPlace | None:
        """Store the result of a delivery. Return the event's place if it waits again."""
        if refusal is None:
            self._metrics.deliveries.labels("delivered").inc()
            await self._storage.retry_until_written(functools.partial(self._outbox.remove, [event.event_id]))
            return None
        self._metrics.deliveries.labels("failed").inc()
        again = self._after_failure(event, refusal)
        if not await self._storage.retry_until_written(functools.partial(self._outbox.replace, again)):
            return None  # it was removed meanwhile
        if not again.dead:
            return place_of(again)
        facts = {"job_id": event.job_id, "tenant": event.tenant, "host": event.host, "text": again.error}
        _log.warning("a webhook is given up; bottega webhooks replay delivers it again", extra=facts)
        self._metrics.given_up.inc()
        await self._note_dead(event.tenant, event.event_id)
        return None

    def _after_failure(self, event: OutboxEvent, refusal: _Refusal) -> OutboxEvent:
        now, attempts = self._storage.steady(), event.attempts + 1
        longest_s = min(self._config.max_retry_s, self._config.first_retry_s * 2.0 ** min(event.attempts, 32))
        # Random jitter spreads the retries of events that failed at the same time.
        wait_s = max(longest_s * random.uniform(0.5, 1.0), min(refusal.retry_after_s, self._config.max_retry_s))
        return dataclasses.replace(
            event,
            attempts=attempts,
            error=refusal.text[:_MAX_ERROR_CHARACTERS],
            due_steady=now + wait_s,
            dead=refusal.final or now - event.tried_since_steady >= self._config.give_up_s,
        )

    async def _post(self, event: OutboxEvent) -> _Refusal | None:
        """Send an event. Return why that failed, or None."""
        import httpx

        from bottega.outside_address import SHARE

        assert self._client is not None
        try:
            self._config.check(event.url)
        except AddressRefused as error:
            return _Refusal(text=error.message, final=True)
        try:
            await self._terms.refresh()
            headers = self._headers(event)
            if headers is None:
                return _Refusal(text="the tenant has no secret to sign with: bottega tenants webhook")
            async with (
                asyncio.timeout(self._config.delivery_s),
                self._client.stream(
                    "POST", event.url, content=event.body, headers=headers, extensions={SHARE: event.tenant}
                ) as answer,
            ):
                return _refusal(answer.status_code, answer.headers.get("retry-after", ""))
        except TimeoutError:
            return _Refusal(text=f"no answer within {self._config.delivery_s:g} s")
        except AddressRefused as error:
            return _Refusal(text=error.message)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return _Refusal(text=f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - otherwise it would be tried for ever
            _log.exception("a webhook could not be sent", extra={"event_id": event.event_id, "tenant": event.tenant})
            return _Refusal(text=f"the gateway failed: {type(error).__name__}")

    def _headers(self, event: OutboxEvent) -> dict[str, str] | None:
        """Return the headers of a delivery, with a signature by each secret of the tenant; None if it has none."""
        secrets = self._terms.webhooks(event.tenant).secrets
        now = dt.datetime.fromtimestamp(int(self._clock.wall()), dt.UTC)
        signatures = [Webhook(secret).sign(event.event_id, now, event.body.decode()) for secret in secrets]
        return (
            {
                "content-type": "application/json",
                "user-agent": f"Bottega/{version()}",
                "webhook-id": event.event_id,
                "webhook-timestamp": f"{now.timestamp():.0f}",
                "webhook-signature": " ".join(signatures),
            }
            if signatures
            else None
        )

    def _new_client(self) -> httpx.AsyncClient:
        import httpx

        from bottega.outside_address import PinnedTransport, outside_client

        verify = httpx.create_ssl_context(trust_env=False)
        if self._config.authorities:
            try:
                verify.load_verify_locations(Path(self._config.authorities).expanduser())
            except OSError as error:  # an SSLError is one, too
                why = error.strerror or "it has no certificates"
                raise ConfigError(f"webhooks.authorities: {self._config.authorities} cannot be used: {why}") from None
        transport = PinnedTransport(self._config, max_resolving=self._config.max_deliveries_per_tenant, verify=verify)
        return outside_client(transport, timeout_s=self._config.delivery_s)

    async def _note_dead(self, tenant: str, event_id: str) -> None:
        """Count an event that was given up, and drop the oldest of its tenant if there are too many."""
        dead = self._dead.setdefault(tenant, OrderedDict())
        dead[event_id] = None
        if len(dead) > self._config.max_dead:
            oldest = next(iter(dead))
            self._forget_dead(tenant, oldest)
            await self._outbox.remove([oldest])
            self._metrics.dropped.inc()
            why = "a webhook is dropped, because its tenant has too many that were given up"
            _log.warning(why, extra={"event_id": oldest, "tenant": tenant})

    async def _drop_damaged(self, event_id: str) -> None:
        self._metrics.dropped.inc()
        why = "a webhook is dropped, because its row in the job store is damaged"
        _log.error(why, extra={"event_id": event_id})
        with contextlib.suppress(BottegaError):  # if the whole store is damaged, it is only read
            await self._outbox.remove([event_id])
            for tenant in tuple(self._dead):
                self._forget_dead(tenant, event_id)

    def _forget_dead(self, tenant: str, event_id: str) -> None:
        for events in (self._dead, self._left_out):
            if tenant in events:
                events[tenant].pop(event_id, None)
                if not events[tenant]:
                    del events[tenant]


def _refusal(status: int, retry_after: str) -> _Refusal | None:
    """Return why an answer is no acceptance, or None for 2xx."""
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return _Refusal(text=f"HTTP {status}: redirects are not followed")
    wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
    return _Refusal(text=f"HTTP {status}", final=status == _GONE, retry_after_s=wait_s)
