"""The SDK without asyncio: the same client, run on an event loop in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from bottega.client.addons.controlnets.hosting import AddedControlNet, ServedControlNet
from bottega.client.addons.controlnets.profiling import MeasuredProfile, ProfileCase
from bottega.client.addons.loras.profiling import LoraBoundMeasured
from bottega.client.addons.loras.quarantine import StoreQuarantine
from bottega.client.sdk.aio import AsyncClient
from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.sdk.loop_thread import LoopThread
from bottega.client.transport.retry import RetryPolicy
from bottega.client.types.events import Event
from bottega.client.types.jobs import JobPage, JobState, JobStatus
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Picture
from bottega.v1.fleet_pb2 import ListMembersResponse
from bottega.v1.image_pb2 import Model
from bottega.v1.lora_pb2 import RestoreLoraResponse, StoredLora


class Client:
    """A connection to a gateway; AsyncClient documents the arguments and the methods.

    Safe to share between threads. Close it (`with` does); one that is forgotten closes when it is collected.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        fleet_address: str | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._loop = LoopThread()
        try:
            self._client = self._loop.run(_open(address, fleet_address, timeout_s, retry))
        except BaseException:
            self._loop.stop()
            raise
        self._close = weakref.finalize(self, _close, self._client, self._loop)

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return self._client.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what was left unfinished, then closes the connection. Twice is fine."""
        self._close()

    def generate(
        self,
        prompt: str,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Picture:
        """Draws one picture: `client.generate("a big red star", seed=7).save("star.png")`."""
        return self._loop.run(
            self._client.generate(prompt, timeout_s=timeout_s, deadline_s=deadline_s, request_id=request_id, **options)
        )

    def generate_many(
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
        return self._loop.run(
            self._client.generate_many(
                prompt, num_images, timeout_s=timeout_s, deadline_s=deadline_s, request_id=request_id, **options
            )
        )

    def stream(
        self,
        prompt: str,
        *,
        num_images: int = 1,
        preview: bool = False,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[Event, None, None]:
        """Draws, and tells what happens: Queued, Progress, Interrupted, and as the last one Completed."""
        return self._loop.pull(
            self._client.stream(
                prompt,
                num_images=num_images,
                preview=preview,
                timeout_s=timeout_s,
                deadline_s=deadline_s,
                request_id=request_id,
                **options,
            )
        )

    def submit(
        self,
        prompt: str,
        *,
        num_images: int = 1,
        deadline_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Job:
        """Starts a job that outlives this connection: `job.result()` has its pictures, now or much later."""
        job = self._loop.run(
            self._client.submit(prompt, num_images=num_images, deadline_s=deadline_s, request_id=request_id, **options)
        )
        return Job(job, self, self._loop)

    def job(self, job_id: str) -> Job:
        """The job of that id, wherever it began. Asks nobody: an unknown one is JobNotFound when it is used."""
        return Job(self._client.job(job_id), self, self._loop)

    def list_jobs(
        self,
        *,
        states: Iterable[JobState] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 20,
        page_token: str = "",
    ) -> JobPage:
        """A page of jobs, newest first; without states, in all of them. Times need a time zone."""
        return self._loop.run(
            self._client.list_jobs(
                states=states,
                created_after=created_after,
                created_before=created_before,
                page_size=page_size,
                page_token=page_token,
            )
        )

    def models(self) -> tuple[Model, ...]:
        """The models that are served now."""
        return self._loop.run(self._client.models())

    def fleet(self) -> ListMembersResponse:
        """The services that have joined, and how busy they are."""
        return self._loop.run(self._client.fleet())

    def controlnets(self) -> tuple[ServedControlNet, ...]:
        """The ControlNets that are served now, and who has them."""
        return self._loop.run(self._client.controlnets())

    def add_controlnet(self, name: str, folder: str, *, server: str | None = None) -> tuple[AddedControlNet, ...]:
        """Has every ControlNet server host one more, or one of them by its name."""
        return self._loop.run(self._client.add_controlnet(name, folder, server=server))

    def loras(self) -> tuple[StoredLora, ...]:
        """The LoRAs that the suite has."""
        return self._loop.run(self._client.loras())

    def lora(self, name: str) -> StoredLora:
        """One LoRA of the suite."""
        return self._loop.run(self._client.lora(name))

    def add_lora(
        self, name: str, path: Path, *, base: str | None = None, trigger_words: Sequence[str] = ()
    ) -> StoredLora:
        """Uploads a LoRA: a safetensors file, or a folder of PEFT or Diffusers."""
        return self._loop.run(self._client.add_lora(name, path, base=base, trigger_words=trigger_words))

    def register_lora(
        self, name: str, path: str, *, base: str | None = None, trigger_words: Sequence[str] = ()
    ) -> StoredLora:
        """Has the store take in a file or folder of its own machine."""
        return self._loop.run(self._client.register_lora(name, path, base=base, trigger_words=trigger_words))

    def remove_lora(self, name: str) -> None:
        """Forgets a LoRA."""
        self._loop.run(self._client.remove_lora(name))

    def pin_lora(self, name: str, pinned: bool = True) -> StoredLora:
        """Keeps a LoRA in the store's memory, or no longer. Its state says whether it is there yet."""
        return self._loop.run(self._client.pin_lora(name, pinned))

    def lora_quarantines(self) -> tuple[StoreQuarantine, ...]:
        """Files of each LoRA store that its catalogue does not know."""
        return self._loop.run(self._client.lora_quarantines())

    def loras_in_quarantine(self) -> int:
        """How many LoRAs are there, as far as their stores know without looking for more."""
        return self._loop.run(self._client.loras_in_quarantine())

    def restore_lora(self, id: str, *, name: str = "", base: str = "") -> RestoreLoraResponse:
        """Brings a LoRA back from quarantine; the answer says what of it could not be known."""
        return self._loop.run(self._client.restore_lora(id, name=name, base=base))

    def discard_lora(self, id: str) -> int:
        """Deletes a LoRA from quarantine, for good; bytes that became free."""
        return self._loop.run(self._client.discard_lora(id))

    def profile_lora(
        self,
        name: str,
        prompts: Sequence[str],
        *,
        scale: float = 1.0,
        num_inference_steps: int | None = None,
        model: str | None = None,
        on_prompt: Callable[[int], None] = lambda _: None,
    ) -> LoraBoundMeasured:
        """Measures how late a LoRA may come into a picture; its store remembers it."""
        return self._loop.run(
            self._client.profile_lora(
                name,
                prompts,
                scale=scale,
                num_inference_steps=num_inference_steps,
                model=model,
                on_prompt=on_prompt,
            )
        )

    def controlnet_root(self, *, server: str | None = None) -> str:
        """The folder, on their machine, below which ControlNet servers host what is added."""
        return self._loop.run(self._client.controlnet_root(server=server))

    def profile_controlnet(
        self,
        name: str,
        cases: Iterable[ProfileCase],
        *,
        num_inference_steps: int | None = None,
        model: str | None = None,
        on_picture: Callable[[float], None] = lambda _: None,
    ) -> MeasuredProfile:
        """Measures how similar a ControlNet's residuals are from step to step; its servers remember it."""
        return self._loop.run(
            self._client.profile_controlnet(
                name, cases, num_inference_steps=num_inference_steps, model=model, on_picture=on_picture
            )
        )

    def set_controlnet_profile(
        self, name: str, *, similarity: float, num_inference_steps: int, model: str | None = None
    ) -> tuple[str, ...]:
        """Has the servers of a ControlNet remember what you know of it."""
        return self._loop.run(
            self._client.set_controlnet_profile(
                name, similarity=similarity, num_inference_steps=num_inference_steps, model=model
            )
        )


class Job:
    """A job by its id, which is all that has to be kept to find it again; AsyncJob documents the methods."""

    def __init__(self, job: AsyncJob, client: Client, loop: LoopThread) -> None:
        self._job = job
        self._client = client  # closes when it is collected: not while its jobs are in use
        self._loop = loop

    @property
    def id(self) -> str:
        """What the gateway calls it."""
        return self._job.id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def status(self) -> JobStatus:
        """How it stands."""
        return self._loop.run(self._job.status())

    def watch(self, *, preview: bool = False, timeout_s: float | None = None) -> Generator[Event, None, None]:
        """Its events from its current state on, the last one Completed. Leaving stops nothing."""
        return self._loop.pull(self._job.watch(preview=preview, timeout_s=timeout_s))

    def result(self, *, timeout_s: float | None = None) -> tuple[Picture, ...]:
        """Its pictures, in order, as soon as they are there: `client.submit("a star").result()[0].save("star.png")`."""
        return self._loop.run(self._job.result(timeout_s=timeout_s))

    def image(self, index: int = 0, *, timeout_s: float | None = None) -> Picture:
        """One of its finished pictures."""
        return self._loop.run(self._job.image(index, timeout_s=timeout_s))

    def cancel(self) -> JobStatus:
        """Cancels it, and says how it stands then; one that has ended stays as it is."""
        return self._loop.run(self._job.cancel())


async def _open(
    address: str | None, fleet_address: str | None, timeout_s: float, retry: RetryPolicy | None
) -> AsyncClient:
    # A channel belongs to the loop that it is made in.
    return AsyncClient(address, fleet_address=fleet_address, timeout_s=timeout_s, retry=retry)


def _close(client: AsyncClient, loop: LoopThread) -> None:
    loop.run(client.close())
    loop.stop()
