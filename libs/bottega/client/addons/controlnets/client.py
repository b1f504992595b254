"""The clients' methods about ControlNets: which are served, how servers are given more, and their profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from bottega.client.addons.controlnets.hosting import controlnets_of
from bottega.client.addons.controlnets.profiling import measure_residuals
from bottega.client.addons.controlnets.servers import add_to_server, controlnet_servers, import_root, store_profile
from bottega.client.addons.controlnets.types import (
    AddedControlNet,
    MeasuredProfile,
    ProfileCase,
    ResidualProfile,
    ServedControlNet,
)
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.blocking import blocking
from bottega.client.sdk.sync import GatewayClient
from bottega.client.types.messages import build_message
from bottega.errors import ModelNotFound
from bottega.v1.controlnet_pb2 import AddControlNetRequest


class AsyncControlNetMethods(AsyncGatewayClient):
    """What AsyncClient offers about ControlNets."""

    async def controlnets(self) -> tuple[ServedControlNet, ...]:
        """The ControlNets that are served now, by name, and who has them."""
        return controlnets_of(await self.fleet())

    async def add_controlnet(self, name: str, folder: str, *, server: str | None = None) -> tuple[AddedControlNet, ...]:
        """Has every ControlNet server host one more, or one of them by its name; says what each made of it.

        folder: in Diffusers' layout on the servers' machines, below the root that their configuration allows.
        Raises NoControlNet where no server has joined, and InvalidRequest where none has that name.
        """
        fleet = await self.fleet()
        request = build_message(AddControlNetRequest(), name=name, folder=folder)
        servers = controlnet_servers(fleet, name=server)
        return tuple(await asyncio.gather(*(add_to_server(one, request) for one in servers)))

    async def controlnet_root(self, *, server: str | None = None) -> str:
        """The folder, on their machine, below which ControlNet servers host what is added; or one of them, by name."""
        return await import_root(controlnet_servers(await self.fleet(), name=server))

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
        measured = await measure_residuals(
            self, name, cases, num_inference_steps=num_inference_steps, model=model, on_picture=on_picture
        )
        servers = await store_profile(await self.fleet(), name, measured.profile, digest=measured.digest)
        return replace(measured, servers=servers)

    async def set_controlnet_profile(
        self, name: str, *, similarity: float, num_inference_steps: int, model: str | None = None
    ) -> tuple[str, ...]:
        """Has the servers of a ControlNet remember what you know of it, whatever was measured; says who they are.

        similarity: cosine, -1 to 1; num_inference_steps: from how many on it holds. See profile_controlnet().
        model: absent is the only one that is served; else ModelNotFound is raised.
        """
        models = await self.models()
        found = [one for one in models if model in (None, one.name)]
        if len(found) != 1:
            served = ", ".join(one.name for one in models) or "none"
            raise ModelNotFound(f"say which model; served: {served}", metadata={"served": served})
        profile = ResidualProfile(
            model_hash=found[0].model_hash, num_inference_steps=num_inference_steps, similarity=similarity
        )
        return await store_profile(await self.fleet(), name, profile, digest=None)


class ControlNetMethods(GatewayClient):
    """What Client offers about ControlNets."""

    controlnets = blocking(AsyncControlNetMethods.controlnets)
    add_controlnet = blocking(AsyncControlNetMethods.add_controlnet)
    controlnet_root = blocking(AsyncControlNetMethods.controlnet_root)
    profile_controlnet = blocking(AsyncControlNetMethods.profile_controlnet)
    set_controlnet_profile = blocking(AsyncControlNetMethods.set_controlnet_profile)
