"""The SDK for asyncio, for calls to the gateway: pictures, jobs, models and the fleet.

Add-ons (bottega.client.addons) derive from AsyncGatewayClient; bottega.client.sdk.clients combines all of them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from bottega.client.sdk.aio_job import AsyncJob, LastProgress, timeout_error
from bottega.client.transport.calls import CallDeadline, CallTimeout, RetryPolicy
from bottega.client.transport.connection import GatewayConnection, default_address
from bottega.client.transport.credentials import Tls, default_key, tls_from_environment
from bottega.client.transport.watching import CancelOnExit, job_has_ended, wait_until_completed, watch_job
from bottega.client.types.fleet import FleetStatus, merge_fleets
from bottega.client.types.inputs import ImageSource, MaskSource
from bottega.client.types.jobs import (
    Completed,
    Event,
    JobPage,
    JobState,
    Priority,
    page_request,
    priority_to_wire,
    status_from,
)
from bottega.client.types.messages import build_message
from bottega.client.types.models import (
    Adapter,
    AdapterKindName,
    ServedModel,
    adapter_from,
    adapter_kind_to_wire,
    model_from,
)
from bottega.client.types.options import EditOptions, GenerationOptions, spec_from
from bottega.client.types.picture import Picture
from bottega.client.types.webhooks import (
    ReplayedWebhooks,
    Webhook,
    WebhookPage,
    replay_request,
    webhook_page_from,
    webhook_page_request,
    webhook_to_wire,
)
from bottega.errors import BottegaError, DeadlinePassed, InternalError, Violation
from bottega.rules import refuse
from bottega.v1 import image_pb2
from bottega.v1.webhook_pb2_grpc import WebhookServiceStub

ResultT = TypeVar("ResultT")

# Arguments that are or have images.
_IMAGES = ("image", "mask_image", "controlnets")
# A page has at most 100 adapters.
_MAX_ADAPTER_PAGES = 2000


class AsyncGatewayClient:
    """The methods of AsyncClient that call the gateway. AsyncClient documents the arguments."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        fleet_address: str | Sequence[str] | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._connection = GatewayConnection(
            default_address() if address is None or address == "" else address,
            fleet_address=None if fleet_address == "" else fleet_address,
            api_key=default_key() if api_key is None else api_key,
            tls=tls or tls_from_environment(),
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
        )
        self._cancel_on_exit = CancelOnExit(self._connection.images)

    @property
    def address(self) -> str:
        """host:port of the gateway; several with commas between them."""
        return self._connection.address

    @property
    def shows_key(self) -> bool:
        """Whether the client sends an API key, which identifies a tenant to the gateway."""
        return self._connection.shows_key

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel unfinished requests, then close the connection."""
        await self._cancel_on_exit.finish()
        await self._connection.close()

    async def generate(
        self,
        prompt: str,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        **options: Unpack[GenerationOptions],
    ) -> Picture:
        """Draw one picture. GenerationOptions lists the options; stream() documents the other arguments."""
        several: object = prompt
        if isinstance(several, list | tuple):
            refuse([Violation(field="prompt", description="must be a text; generate_many() draws several prompts")])
        images = await self.generate_many(
            prompt,
            1,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            request_id=request_id,
            priority=priority,
            **options,
        )
        return images[0]

    async def generate_many(
        self,
        prompt: str | Sequence[str],
        num_images: int = 1,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        **options: Unpack[GenerationOptions],
    ) -> tuple[Picture, ...]:
        """Draw 1 to 8 pictures together. Picture i is drawn like a single one with seed + i.

        GenerationOptions lists the options; stream() documents the other arguments.
        """
        stream = self.stream(
            prompt,
            num_images=num_images,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            request_id=request_id,
            priority=priority,
            **options,
        )
        images = (await wait_until_completed(stream)).images
        if not images:
            raise InternalError("the gateway reports a completed job without a picture")
        return images

    async def edit(
        self,
        image: ImageSource,
        mask: MaskSource,
        prompt: str,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        **options: Unpack[EditOptions],
    ) -> Picture:
        """Redraw the part of an image that a mask covers. Outside the mask the picture keeps the image's own pixels.

        This is generate(prompt, image=image, mask_image=mask); generate_many(), stream() and submit() edit likewise.

        Args:
            image: Encoded bytes, a path, a Pillow image or a Picture.
            mask: An image of any size, white where the other one is redrawn; or a Box, an Ellipse or a list of them, in
                pixels of the image. None is refused, because without a mask the whole image would be redrawn.
            prompt: Describes the whole resulting picture.
            **options: EditOptions lists them; stream() documents the other arguments.
        """
        given: dict[str, object] = {"image": image, "mask_image": mask}
        refuse([Violation(field=name, description="must be given") for name, value in given.items() if value is None])
        return await self.generate(
            prompt,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            request_id=request_id,
            priority=priority,
            image=image,
            mask_image=mask,
            **options,
        )

    async def stream(
        self,
        prompt: str | Sequence[str],
        *,
        num_images: int = 1,
        preview: bool = False,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Event, None]:
        """Draw pictures, and yield events: Queued, Progress, Interrupted, and Completed as the last one.

        Args:
            prompt: The prompt of all pictures, or a list with one for each.
            num_images: Number of pictures of a single prompt, 1 to 8.
            preview: Whether Progress carries small JPEGs of the unfinished pictures.
            timeout_s: Seconds after which to give up; None for the client's own.
            deadline_s: Seconds after which the pictures are of no use. A request that cannot be done by then is refused
                at once with DeadlineUnmeetable, or dropped when it turns out to be late. The default is timeout_s, or
                no deadline with a request_id of yours.
            request_id: Your own idempotency key. The same ID with the same arguments gives the same pictures, and the
                job goes on when you leave. Without it the SDK makes an ID to attach again after a broken connection,
                and cancels the job when you leave: when you close the generator or the client, are cancelled, or run
                out of time.
            priority: Urgency among your own requests; those of other tenants are not affected.
            **options: GenerationOptions lists them.
        """
        images, terms = self._connection.images, self._connection.terms(timeout_s)
        deadline = None if request_id else terms.deadline
        if deadline_s is not None:
            deadline = CallDeadline.after(deadline_s, name="deadline_s")
        spec = await _off_loop(options, spec_from, prompt, options, num_images=num_images)
        request = image_pb2.GenerateRequest(spec=spec, priority=priority_to_wire(priority))
        _set_time_left(request, deadline)
        await _off_loop(options, build_message, request, request_id=request_id or uuid.uuid4().hex, preview=preview)
        last, over = LastProgress(), False

        def attach(left_s: float) -> grpc.aio.UnaryStreamCall[image_pb2.GenerateRequest, image_pb2.GenerateResponse]:
            _set_time_left(request, deadline)
            return images.Generate(request, timeout=left_s)

        try:
            async with aclosing(watch_job(attach, images, terms)) as events:
                async for event in events:
                    last.update(event)
                    over = isinstance(event, Completed)
                    yield event
        except DeadlinePassed as error:
            if request_id and not isinstance(error, CallTimeout):
                raise  # the job's own deadline has passed
            raise timeout_error(error, last, goes_on=bool(request_id)) from error
        except BottegaError as error:
            over = job_has_ended(error)
            raise
        finally:
            if not over and not request_id:
                self._cancel_on_exit.cancel_soon(request, last.job_id)

    async def submit(
        self,
        prompt: str | Sequence[str],
        *,
        num_images: int = 1,
        deadline_s: float | None = None,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        webhook: Webhook | str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncJob:
        """Start a job that outlives this connection: `job.result()` returns its pictures, now or much later.

        Args:
            deadline_s: As in stream(); the default is no deadline.
            request_id: As in stream(). Without it the SDK makes an ID for this call's own retries.
            webhook: Where to announce the job's end, if not as the tenant's own webhook says; a URL for all events.
            **options: GenerationOptions lists them; stream() documents the other arguments.
        """
        deadline = CallDeadline.after(deadline_s, name="deadline_s") if deadline_s is not None else None
        spec = await _off_loop(options, spec_from, prompt, options, num_images=num_images)
        request = image_pb2.SubmitJobRequest(spec=spec, priority=priority_to_wire(priority))
        if webhook is not None:
            request.webhook.CopyFrom(webhook_to_wire(webhook))
        _set_time_left(request, deadline)
        await _off_loop(options, build_message, request, request_id=request_id or uuid.uuid4().hex)
        answer = await self._connection.call(
            self._connection.images.SubmitJob, request, before_try=lambda request: _set_time_left(request, deadline)
        )
        return self.job(answer.job.job_id)

    def job(self, job_id: str) -> AsyncJob:
        """Return a handle on the job with this ID. Its methods raise JobNotFound if there is no such job."""
        return AsyncJob(job_id, self._connection)

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its pictures; the same as job(job_id).delete()."""
        await self.job(job_id).delete()

    async def list_jobs(
        self,
        *,
        states: Iterable[JobState] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 20,
        page_token: str = "",
    ) -> JobPage:
        """Return a page of jobs, newest first.

        Args:
            states: Only jobs in these states; empty for all.
            created_after: Only newer jobs; the time needs a time zone.
            created_before: Only older jobs; the time needs a time zone.
            page_size: Largest number of jobs, 1 to 100.
            page_token: `next_page_token` of the previous page.
        """
        request = page_request(states, created_after, created_before, page_size=page_size, page_token=page_token)
        answer = await self._connection.call(self._connection.images.ListJobs, request)
        return JobPage(jobs=tuple(status_from(job) for job in answer.jobs), next_page_token=answer.next_page_token)

    async def models(self) -> tuple[ServedModel, ...]:
        """Return the models that requests may name now, sorted by name."""
        answer = await self._connection.call(self._connection.images.ListModels, image_pb2.ListModelsRequest())
        return tuple(map(model_from, answer.models))

    async def adapters(self, kind: AdapterKindName | None = None) -> tuple[Adapter, ...]:
        """Return the ControlNets and LoRAs that requests may name now, sorted by kind and name.

        Tenants may call this with their API key. controlnets() and loras() return more details, only to operators.

        Args:
            kind: "controlnet" or "lora"; None for both.
        """
        request = image_pb2.ListAdaptersRequest(kind=adapter_kind_to_wire(kind))
        found: list[Adapter] = []
        for _ in range(_MAX_ADAPTER_PAGES):
            answer = await self._connection.call(self._connection.images.ListAdapters, request)
            found.extend(adapter for adapter in map(adapter_from, answer.adapters) if adapter is not None)
            if not answer.next_page_token:
                return tuple(found)
            request.page_token = answer.next_page_token
        raise InternalError(f"the gateway's list of adapters does not end after {_MAX_ADAPTER_PAGES} pages")

    async def fleet(self) -> FleetStatus:
        """Return all gateways, and the services that have joined, what they host and how busy they are."""
        return merge_fleets(await self._connection.fleets())

    async def undelivered_webhooks(
        self, *, tenant: str | None = None, dead: bool = False, page_size: int = 20, page_token: str = ""
    ) -> WebhookPage:
        """Return a page of webhook events that are not delivered yet, newest first; for operators.

        Args:
            tenant: Only events of this tenant; None for all.
            dead: Only events that were given up.
            page_size: Largest number of events, 1 to 100.
            page_token: `next_page_token` of the previous page.
        """
        request = webhook_page_request(tenant=tenant, dead=dead, page_size=page_size, page_token=page_token)
        return webhook_page_from(
            await self._connection.call_fleet(lambda channel: WebhookServiceStub(channel).ListWebhookEvents, request)
        )

    async def replay_webhooks(
        self, event_ids: Iterable[str] = (), *, all_dead: bool = False, tenant: str | None = None
    ) -> ReplayedWebhooks:
        """Deliver webhook events again; for operators.

        Args:
            event_ids: IDs of events, at most 100.
            all_dead: Events that were given up, oldest first, in place of IDs.
            tenant: With all_dead only those of this tenant.
        """
        request = replay_request(event_ids, all_dead=all_dead, tenant=tenant)
        answer = await self._connection.call_fleet(
            lambda channel: WebhookServiceStub(channel).ReplayWebhookEvents, request
        )
        return ReplayedWebhooks(replayed=answer.replayed, damaged=answer.damaged, left=answer.left)


async def _off_loop(
    options: GenerationOptions, function: Callable[..., ResultT], *arguments: object, **named: object
) -> ResultT:
    """Call a function, and return its result. If the request has images, which take long to copy, use a thread."""
    if any(options.get(name) is not None for name in _IMAGES):
        return await asyncio.to_thread(function, *arguments, **named)
    return function(*arguments, **named)


def _set_time_left(
    request: image_pb2.GenerateRequest | image_pb2.SubmitJobRequest, deadline: CallDeadline | None
) -> None:
    """Set the seconds that remain until the deadline in a request. Raise DeadlinePassed if none remain."""
    if deadline:
        request.deadline_s = deadline.remaining_s()
