"""Builds the parts of a worker's engine process: model, engine, the manifest's add-ons, link to its peer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path

from bottega import kinds
from bottega.device.devices import compute_with, pick_device
from bottega.device.engine_start import StartReporter, silent_reporter
from bottega.device.heartbeat import Heartbeat
from bottega.device_links.devices import device_links
from bottega.engine.acceleration.self_check import TrialLog, candidates
from bottega.engine.addon import EngineAddOn, EngineAddOnContext
from bottega.engine.engine import Engine
from bottega.engine.limits import EngineLimits
from bottega.errors import ConfigError, InvalidRequest
from bottega.manifest import load_object, read_services
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.text_encoders import TextEncoderSettings
from bottega.model.vae import VaeSettings
from bottega.model.weights import DTYPES, pick_dtype
from bottega.model_files.digest import KnownDigests
from bottega.model_files.folder_check import name_of
from bottega.rpc.link_service import link_endpoints
from bottega.rpc.status import from_job_error
from bottega.state_folder import service_state
from bottega.transport import DeviceLinks, LinkCounters, ServiceOffer, offer_from_wire
from bottega.v1.link_pb2 import LinkResult, LinkTerm, OpenLinkRequest, OutgoingLinkRequest
from bottega.worker.config import EngineConfig, check_text_encoders, report_on_model
from bottega.worker.peer import Follower, Leader, PeerLinkSettings
from bottega.worker.stages.addons import stage_addons

_log = logging.getLogger(__name__)


def load_addons(context: EngineAddOnContext) -> Iterator[EngineAddOn]:
    """Yield the add-ons of the manifest's services in order, but edits last; see EngineEdits.

    Raises:
        ConfigError: The manifest names something that is not an add-on, or an add-on raises it.
    """
    for service in sorted(read_services(), key=lambda service: service.kind == kinds.ACTIVATIONS):
        if not service.engine_add_on:
            continue
        addon = load_object(service.engine_add_on)(context)
        if not isinstance(addon, EngineAddOn) or addon.kind != service.kind:
            raise ConfigError(f"{service.engine_add_on} does not make an EngineAddOn of kind {service.kind}")
        yield addon


class LinkRequests:
    """An OfferSource that asks other services for tensor connections through the front process.

    Any thread may call `request`. One thread calls `answer`.

    Args:
        send: Sends a request to the front process.
    """

    def __init__(self, send: Callable[[OutgoingLinkRequest], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[ServiceOffer]] = {}

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        link_terms = [LinkTerm(name=name, value=value) for name, value in (terms or {}).items()]
        request = OutgoingLinkRequest(
            request=next(self._numbers),
            address=address,
            open=OpenLinkRequest(kind=kind, link_id=link_id, terms=link_terms),
        )
        offer = self._pending[request.request] = Future[ServiceOffer]()
        self._send(request)
        return offer

    def answer(self, message: LinkResult) -> None:
        """Handle the front process's answer to a request: an error if the service does not answer."""
        offer = self._pending.pop(message.request, None)
        if offer is None:
            return
        if message.HasField("error"):
            offer.set_exception(from_job_error(message.error))
            return
        try:
            offer.set_result(ServiceOffer(offer=offer_from_wire(message.opened.offer), service=message.opened.service))
        except InvalidRequest as error:
            offer.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The parts of an engine process."""

    config: EngineConfig
    engine: Engine
    counters: LinkCounters
    """Counters of all tensor connections of the process."""
    heartbeat: Heartbeat
    """Sends heartbeats while the engine computes."""
    peer: Leader | None = None
    """The other worker of a pair, to which this engine offloads batch rows; None without a pair."""
    devices: DeviceLinks | None = None
    """Direct transfers between devices; None if they are not possible."""

    def follow(self, post: Callable[[Callable[[], None]], None]) -> Follower | None:
        """Return the follower, which computes rows for the other worker of the pair; None without a pair.

        Args:
            post: Runs a function in the engine's thread soon.

        Raises:
            ConfigError: The address for the other worker's connection cannot be bound.
        """
        if self.peer is None:
            return None
        links = self.config.links
        endpoints = link_endpoints(links.listen, links.socket, seal=links.seal)
        return Follower(
            endpoints,
            remote_jobs=self.engine.remote_jobs,
            counters=self.counters,
            post=post,
            devices=self.devices,
        )


def load_runtime(
    config: EngineConfig,
    link_requests: LinkRequests,
    reporter: StartReporter | None = None,
    *,
    trials: Path | None = None,
) -> Runtime:
    """Load the model, check accelerations, and warm up.

    Args:
        link_requests: Asks other services for tensor connections.
        reporter: Reports the stages of the start, and every block of a network that runs; None reports nothing.
        trials: See TrialLog.

    Raises:
        OSError: A file of the model cannot be read.
        ValueError: A file of the model has invalid content.
        BottegaError: The model, the device or an add-on cannot be used.
    """
    reporter = reporter or silent_reporter()
    compute_with(config.threads)
    model, counters, heartbeat = load_model_for(config, reporter), LinkCounters(), Heartbeat()
    heartbeat.subscribe(reporter.advance)
    heartbeat.subscribe_covered(reporter.advance)
    devices = device_links(config.links.devices, model.device, budget=model.memory)
    context = EngineAddOnContext(
        sections=[getattr(config, field.name) for field in fields(config)],
        fixed_rows=config.fixed_rows,
        model=model,
        offers=link_requests,
        counters=counters,
        heartbeat=heartbeat,
        devices=devices,
    )
    peer = _leader(config, context) if config.peer.address and _has_two_rows(model) else None
    reporter.begin("preparing add-ons")
    addons = (*stage_addons(config.asks, context), *load_addons(context))
    engine = Engine(model, _limits(config), addons=addons, peer=peer, heartbeat=heartbeat)
    accelerations = candidates(config.accelerations, model)
    if accelerations:
        reporter.begin("checking accelerations")
    engine.check_accelerations(accelerations, deadline_s=config.self_check_s, trials=TrialLog(trials))
    reporter.begin("warming up")
    engine.warm_up()
    heartbeat.unsubscribe(reporter.advance)
    return Runtime(config=config, engine=engine, counters=counters, heartbeat=heartbeat, peer=peer, devices=devices)


def load_model_for(config: EngineConfig, reporter: StartReporter) -> Model:
    """Load the parts of a worker's model that its roles need. Raises the errors of `load_runtime`."""
    report, device = report_on_model(config), pick_device(config.device)
    if report.problems:
        raise ConfigError(report.refusal)
    check_text_encoders(config, report)
    text = {
        part: TextEncoderSettings(dtype=DTYPES.get(settings.dtype), on_host=settings.keep_on == "host")
        for part, settings in config.text.encoders.items()
    }
    reporter.begin("choosing an element type")
    return load_model(
        report.folder,
        name=name_of(config.model, config.model_name),
        device=device,
        dtype=pick_dtype(config.dtype, report, device),
        vae=VaeSettings(dtype=config.vae.dtype, tile_pixels=config.vae.tile_pixels),
        text=text,
        prompt_cache_bytes=config.text.cache_mib << 20,
        device_memory_mib=config.device_memory_mib,
        device_memory_share=config.device_memory_share,
        variant=config.model_variant,
        vae_folder=Path(config.vae.folder) if config.vae.folder else None,
        reporter=reporter,
        known_digests=KnownDigests(service_state() / "digests.json"),
        roles=config.roles,
    )


def _limits(config: EngineConfig) -> EngineLimits:
    return EngineLimits(
        max_rows=config.max_rows,
        fixed_rows=config.fixed_rows,
        max_wait_turns=config.max_wait_turns,
        max_pixels=config.max_pixels,
        compile_s=config.compile_s,
        checkpoint_interval_s=config.checkpoint_interval_s,
        progress_interval_s=config.progress_interval_s,
    )


def _has_two_rows(model: Model) -> bool:
    """Return whether requests of a model may have two rows, which a pair of workers shares. Log it if few have."""
    if model.embeds_guidance and not model.family.takes_true_cfg:
        _log.warning(
            "engine.peer is not used: a pair shares the two rows of a guided request, and pictures of this model have "
            "one row, because its guidance is embedded; remove engine.peer",
            extra={"model": model.name},
        )
        return False
    if model.embeds_guidance:
        _log.info(
            "a pair of workers shares only requests with a true_cfg_scale above 1: others have one row with this "
            "model, because its guidance is embedded",
            extra={"model": model.name},
        )
    return True


def _leader(config: EngineConfig, context: EngineAddOnContext) -> Leader:
    model = context.model
    return Leader(
        config.peer.address,
        terms={"model_hash": model.digest, "dtype": model.dtype_name},
        offers=context.offers,
        counters=context.counters,
        settings=PeerLinkSettings(silence_s=config.peer.silence_s, devices=context.devices),
    )
