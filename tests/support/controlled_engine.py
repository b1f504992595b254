"""An engine whose ControlNets are on servers in this process, at the ends of real links, and orders for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.addons.controlnets.engine.provider import ControlHosts
from bottega.addons.controlnets.worker import ControlLinkSettings, RemoteControlNets
from bottega.engine.events import JobAdvanced
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.transport import Limits, OfferSource, ServiceOffer
from tests.fakes.scripted_controlnet_link import ScriptedServer
from tests.samples.controlnets import control_image, control_spec, layout_of, random_controlnet, save
from tests.samples.small_model import SIZE
from tests.support import linked_servers
from tests.support.addon_messages import placed
from tests.support.engines import make_engine
from tests.support.linked_servers import LinkedServer
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.offers import OffersAtOnce

NAMES = ("edges", "depth", "layout")
IMAGES = (control_image(1), control_image(2), control_image(3, 80, 112))
PLAIN = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=5, width=SIZE, height=SIZE, seed=1
)
ALONE = EngineLimits(max_rows=2)
# Of servers that shall not be given up, however busy the machine is.
PATIENCE_S = 10.0


class Desk:
    """An engine whose ControlNets are on servers. open: those that hold links."""

    open: ClassVar[list[Desk]] = []

    def __init__(self, model: Model, offers: OfferSource, limits: EngineLimits = ALONE, **options: Any) -> None:
        settings = ControlLinkSettings(
            silence_s=options.pop("silence_s", PATIENCE_S),
            stall_s=options.pop("stall_s", PATIENCE_S),
            limits=Limits(slots=options.pop("slots", 8)),
        )
        self.controlnets = RemoteControlNets(
            base=options.pop("base", layout_of(model)),
            model=model,
            offers=offers,
            settings=settings,
            **options,
        )
        self.easel = ManualEngine(make_engine(model, limits, controlnets=self.controlnets))
        self.open.append(self)

    def draw(self, order: EngineOrder) -> Drawing:
        return self.easel.draw(order)

    @classmethod
    @contextmanager
    def closing(cls) -> Iterator[None]:
        """Ends the links of all that were made meanwhile."""
        yield
        for desk in cls.open:
            desk.controlnets.stop()
        cls.open.clear()


def controlled(*controls: tuple[int, float], spec: ResolvedSpec = PLAIN, **options: Any) -> EngineOrder:
    """A job with these ControlNets, by place in NAMES and scale."""
    specs = tuple(control_spec(NAMES[place], IMAGES[place], scale, **options) for place, scale in controls)
    images = tuple(IMAGES[place] for place, _ in controls)
    return EngineOrder(key="controlled", spec=replace(spec, controlnets=specs), control_images=images)


def on(order: EngineOrder, *servers: LinkedServer | ScriptedServer, **options: Any) -> EngineOrder:
    """The order, with its ControlNets on these servers, the best first. options: of its spec."""
    linked = next((server for server in servers if isinstance(server, LinkedServer)), None)
    there = tuple(server.server for server in servers)
    hosts = tuple(
        ControlHosts(digest=linked.digests[control.name] if linked else "", servers=there)
        for control in order.spec.controlnets
    )
    return replace(order, spec=replace(order.spec, **options), addons=placed(hosts))


def alone(model: Model, local: LocalControlNets, order: EngineOrder) -> Tensor:
    """The latent where all ControlNets are in the engine's process, which is stock's to the last bit."""
    (latent,) = ManualEngine(make_engine(model, ALONE, controlnets=local)).draw(order).latents
    return latent


class Pair(OffersAtOnce):
    """Offers of a server that follows a script, and of one that works."""

    def __init__(self, bad: ScriptedServer, good: LinkedServer | None) -> None:
        super().__init__()
        self._bad = bad
        self._good = linked_servers.Offers(*([good] if good else []))

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        chosen: OffersAtOnce = self._bad if address == self._bad.server.address else self._good
        return chosen.answer(address, link_id)


def random_folders(model: Model, folder: Path) -> dict[str, Path]:
    """A random ControlNet for each of NAMES, saved."""
    return save({name: random_controlnet(model.backbone.network, seed) for seed, name in enumerate(NAMES)}, folder)


def steps_done(drawing: Drawing) -> int:
    return max((progress.steps_done for progress in drawing.all(JobAdvanced)), default=0)
