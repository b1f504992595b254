"""The SDK for asyncio: pictures, jobs and a look at the fleet, from one gateway.

Knows how the calls belong together; retries are in bottega.client.transport.calls, arguments in
bottega.client.types.options,
what can be done with a job in bottega.client.sdk.aio_job.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import grpc

from bottega.client.addons.controlnets.hosting import (
    AddedControlNet,
    ResidualProfile,
    ServedControlNet,
    add_to_servers,
    controlnets_of,
    root_of,
)
from bottega.client.addons.controlnets.profiling import MeasuredProfile, ProfileCase, hash_of, measure, note, noted_by
from bottega.client.addons.loras.profiling import LoraBoundMeasured, measure_lora
from bottega.client.addons.loras.quarantine import StoreQuarantine, discard, number_of, quarantines, restore
from bottega.client.addons.loras.stores import LoraStores
from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.transport.address import default_address
from bottega.client.transport.cancel_on_exit import CancelOnExit, is_over
from bottega.client.transport.connection import GatewayConnection
from bottega.client.transport.retry import CallDeadline, CallTimeout, RetryPolicy
from bottega.client.transport.timeouts import LastProgress, late
from bottega.client.transport.watching import watch
from bottega.client.types.events import Completed, Event
from bottega.client.types.jobs import JobPage, JobState, page_request, status_from
from bottega.client.types.messages import filled
from bottega.client.types.options import GenerationOptions, spec_from
from bottega.client.types.picture import Picture
from bottega.errors import BottegaError, DeadlinePassed, InternalError
from bottega.v1 import image_pb2
from bottega.v1.fleet_pb2 import ListMembersResponse
from bottega.v1.image_pb2 import Model
from bottega.v1.lora_pb2 import RestoreLoraResponse, StoredLora


class AsyncClient:
    """A connection to a gateway.

    address: host:port; $BOTTEGA_ADDRESS or 127.0.0.1:8470 when absent.
    fleet_address: host:port where the gateway lists its services, which fleet() and what is about ControlNets and LoRAs
        as such needs, and no drawing; $BOTTEGA_FLEET when absent, else that of the suite that runs here, else port 8472
        of the gateway's machine.
    timeout_s: deadline of every picture that is given none; above 0.
    retry: how to go on while the gateway is UNAVAILABLE, or serves as many calls as it can; nothing else is retried.

    Make it inside a running event loop, and close it (`async with` does): pictures that were begun here
    and left unfinished are cancelled then. Every method raises classes of bottega.errors.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        fleet_address: str | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._connection = GatewayConnection(
            address or default_address(),
            fleet_address=fleet_address or None,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
        )
        self._farewells = CancelOnExit(self._connection.images)

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return self._connection.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what was left unfinished, then closes the connection."""
        await self._farewells.said()
        await self._connection.close()

    async def generate(
        self,
        prompt: str,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Picture:
        """Draws one picture; GenerationOptions lists the keyword arguments.

        timeout_s, deadline_s, request_id: as in stream().
        """
        images = await self.generate_many(
            prompt, 1, timeout_s=timeout_s, deadline_s=deadline_s, request_id=request_id, **options
        )
        return images[0]

    async def generate_many(
        self,
        prompt: str,
        num_images: int,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> tuple[Picture, ...]:
        """Draws 1 to 8 pictures of one prompt together; picture i is drawn as a single one with seed + i."""
        stream = self.stream(
            prompt,
            num_images=num_images,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            request_id=request_id,
            **options,
        )
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Completed) and not event.images:
                    raise InternalError("the gateway says that the job is completed, and has no picture of it")
                if isinstance(event, Completed):
                    return event.images
        raise InternalError("the stream of events ended without a last one")

    async def stream(
        self,
        prompt: str,
        *,
        num_images: int = 1,
        preview: bool = False,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Event, None]:
        """Draws, and tells what happens: Queued, Progress, Interrupted, and as the last one Completed.

        preview: Progress carries small JPEGs of the unfinished pictures.
        timeout_s: give up after so many seconds; the client's own when absent.
        deadline_s: after so many seconds nobody wants the pictures: what cannot be done by then is refused with
            DeadlineUnmeetable before it costs anything, and dropped when it turns out to be too late. Absent, it is
            timeout_s; with a request_id of yours there is none.
        request_id: your own idempotency key. The same id with the same arguments gives the same pictures, and
            the job goes on when you leave. Without it the SDK makes one, so that a broken connection attaches
            again, and cancels the job when you leave: when you close the generator (or the client), are
            cancelled, or run out of time.
        """
        images, terms = self._connection.images, self._connection.terms(timeout_s)
        wanted = None if request_id else terms.deadline
        if deadline_s is not None:
            wanted = CallDeadline.after(deadline_s, name="deadline_s")
        spec = await asyncio.to_thread(spec_from, prompt, options, num_images=num_images)
        request = image_pb2.GenerateRequest(spec=spec)
        _say_time_left(request, wanted)
        await asyncio.to_thread(filled, request, request_id=request_id or uuid.uuid4().hex, preview=preview)
        heard, over = LastProgress(), False

        def attach(left_s: float) -> grpc.aio.UnaryStreamCall[image_pb2.GenerateRequest, image_pb2.GenerateResponse]:
            _say_time_left(request, wanted)
            return images.Generate(request, timeout=left_s)

        try:
            async with aclosing(watch(attach, images, terms)) as events:
                async for event in events:
                    heard.note(event)
                    over = isinstance(event, Completed)
                    yield event
        except DeadlinePassed as error:
            if request_id and not isinstance(error, CallTimeout):
                raise  # the job's own time is over
            raise late(error, heard, goes_on=bool(request_id)) from error
        except BottegaError as error:
            over = is_over(error)
            raise
        finally:
            if not over and not request_id:
                self._farewells.say(request, heard.job_id)

    async def submit(
        self,
        prompt: str,
        *,
        num_images: int = 1,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncJob:
        """Starts a job that outlives this connection: `job.result()` has its pictures, now or much later.

        deadline_s: as in stream(); absent, the job has all the time that it takes.
        request_id: as in stream(); the SDK makes one for this call's own retries.
        """
        wanted = CallDeadline.after(deadline_s, name="deadline_s") if deadline_s is not None else None
        spec = await asyncio.to_thread(spec_from, prompt, options, num_images=num_images)
        request = image_pb2.SubmitJobRequest(spec=spec)
        _say_time_left(request, wanted)
        await asyncio.to_thread(filled, request, request_id=request_id or uuid.uuid4().hex)
        answer = await self._connection.ask(
            self._connection.images.SubmitJob, request, before_try=lambda request: _say_time_left(request, wanted)
        )
        return self.job(answer.job.job_id)

    def job(self, job_id: str) -> AsyncJob:
        """The job of that id, wherever it began. Asks nobody: an unknown one is JobNotFound when it is used."""
        return AsyncJob(job_id, self._connection)

    async def list_jobs(
        self,
        *,
        states: Iterable[JobState] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 20,
        page_token: str = "",
    ) -> JobPage:
        """A page of jobs, newest first; without states, in all of them. Times need a time zone.

        page_size: 1 to 100. page_token: next_page_token of the page before.
        """
        request = page_request(states, created_after, created_before, page_size=page_size, page_token=page_token)
        answer = await self._connection.ask(self._connection.images.ListJobs, request)
        return JobPage(jobs=tuple(status_from(job) for job in answer.jobs), next_page_token=answer.next_page_token)

    async def models(self) -> tuple[Model, ...]:
        """The models that are served now, as the contract describes them."""
        answer = await self._connection.ask(self._connection.images.ListModels, image_pb2.ListModelsRequest())
        return tuple(answer.models)

    async def fleet(self) -> ListMembersResponse:
        """The services that have joined and how busy they are, as the contract describes them."""
        return await self._connection.fleet()

    async def controlnets(self) -> tuple[ServedControlNet, ...]:
        """The ControlNets that are served now, by name, and who has them."""
        return controlnets_of(await self.fleet())

    async def add_controlnet(self, name: str, folder: str, *, server: str | None = None) -> tuple[AddedControlNet, ...]:
        """Has every ControlNet server host one more, or one of them by its name; says what each made of it.

        folder: in Diffusers' layout on the servers' machines, below the root that their configuration allows.
        """
        return await add_to_servers(await self.fleet(), name, folder, server=server)

    async def loras(self) -> tuple[StoredLora, ...]:
        """The LoRAs that the suite has, by name, as the contract describes them."""
        return await (await self._lora_stores()).all()

    async def lora(self, name: str) -> StoredLora:
        """One LoRA of the suite."""
        return await (await self._lora_stores()).get(name)

    async def add_lora(
        self, name: str, path: Path, *, base: str | None = None, trigger_words: Sequence[str] = ()
    ) -> StoredLora:
        """Uploads a LoRA: a safetensors file, or a folder of PEFT or Diffusers.

        base: the model that it was made for; absent where the store knows one alone. trigger_words: those of one that
        is there already change, where some are given.
        """
        return await (await self._lora_stores()).add(name, path, base=base, trigger_words=trigger_words)

    async def register_lora(
        self, name: str, path: str, *, base: str | None = None, trigger_words: Sequence[str] = ()
    ) -> StoredLora:
        """Has the store take in a file or folder of its own machine, below the root that its configuration allows."""
        return await (await self._lora_stores()).register(name, path, base=base, trigger_words=trigger_words)

    async def remove_lora(self, name: str) -> None:
        """Forgets a LoRA."""
        await (await self._lora_stores()).remove(name)

    async def pin_lora(self, name: str, pinned: bool = True) -> StoredLora:
        """Keeps a LoRA in the store's memory, or no longer. Its state says whether it is there yet."""
        return await (await self._lora_stores()).pin(name, pinned)

    async def profile_lora(
        self,
        name: str,
        prompts: Sequence[str],
        *,
        scale: float = 1.0,
        num_inference_steps: int | None = None,
        model: str | None = None,
        on_prompt: Callable[[int], None] = lambda _: None,
    ) -> LoraBoundMeasured:
        """Draws two pictures of each prompt with the LoRA and without, and has the store remember how late it may come.

        That is the first step after which the latents' cosine is below .99, in the worst of the pictures. Requests that
        allow it (by their fidelity, or bounded_lora_loading) then make that many steps of this number of steps without
        it, at most, where it is not at the worker yet; those of another number, in proportion.
        prompts: at least four, of the kind that the LoRA is used with, its trigger words included.
        scale: the strongest that you use it with. num_inference_steps: of the pictures; absent is the model's default.
        on_prompt: told the step of each.
        """
        measured = await measure_lora(
            self.generate_many,
            name,
            prompts,
            scale=scale,
            num_inference_steps=num_inference_steps,
            model=model,
            on_prompt=on_prompt,
        )
        bounds = {measured.num_inference_steps: measured.max_step}
        await (await self._lora_stores()).note_bounds(name, measured.digest, bounds)
        return measured

    async def lora_quarantines(self) -> tuple[StoreQuarantine, ...]:
        """Files of each LoRA store that its catalogue does not know; the store looks for them first."""
        return await quarantines(await self._lora_stores())

    async def loras_in_quarantine(self) -> int:
        """How many LoRAs are there, as far as their stores know without looking for more."""
        return await number_of(await self._lora_stores())

    async def restore_lora(self, id: str, *, name: str = "", base: str = "") -> RestoreLoraResponse:
        """Brings a LoRA back from quarantine; the answer says what of it could not be known.

        name, base: empty is what is known of it, else a name made of its digest, and the one base that it fits.
        """
        return await restore(await self._lora_stores(), id, name=name, base=base)

    async def discard_lora(self, id: str) -> int:
        """Deletes a LoRA from quarantine, for good; bytes that became free."""
        return await discard(await self._lora_stores(), id)

    async def _lora_stores(self) -> LoraStores:
        return LoraStores(await self.fleet())

    async def controlnet_root(self, *, server: str | None = None) -> str:
        """The folder, on their machine, below which ControlNet servers host what is added; or one of them, by name."""
        return await root_of(await self.fleet(), server=server)

    async def profile_controlnet(
        self,
        name: str,
        cases: Iterable[ProfileCase],
        *,
        num_inference_steps: int | None = None,
        model: str | None = None,
        on_picture: Callable[[float], None] = lambda _: None,
    ) -> MeasuredProfile:
        """Draws a picture of each case, measures how similar the ControlNet's residuals are from step to step, and has
        its servers remember the worst picture's.

        From .99 on, requests of at least so many steps that allow it (by their fidelity, or stale_residuals) go on with
        the residuals of the step before where they would wait for a slow link.
        num_inference_steps: of the pictures; absent is the model's default. Take the fewest that you draw with.
        on_picture: told the similarity of each.
        """
        measured = await measure(
            self.generate, name, cases, num_inference_steps=num_inference_steps, model=model, on_picture=on_picture
        )
        servers = await note(await self.fleet(), name, measured.profile, digest=measured.digest)
        return noted_by(measured, servers)

    async def set_controlnet_profile(
        self, name: str, *, similarity: float, num_inference_steps: int, model: str | None = None
    ) -> tuple[str, ...]:
        """Has the servers of a ControlNet remember what you know of it, whatever was measured; says who they are.

        similarity: cosine, -1 to 1; num_inference_steps: from how many on it holds. See profile_controlnet().
        """
        model_hash = hash_of(await self.models(), model)
        profile = ResidualProfile(model_hash=model_hash, num_inference_steps=num_inference_steps, similarity=similarity)
        return await note(await self.fleet(), name, profile, digest=None)


def _say_time_left(
    request: image_pb2.GenerateRequest | image_pb2.SubmitJobRequest, wanted: CallDeadline | None
) -> None:
    """Raises DeadlinePassed when there is none."""
    if wanted:
        request.deadline_s = wanted.remaining_s()
