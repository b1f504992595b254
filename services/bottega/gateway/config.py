"""The configuration of a gateway, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.errors import ConfigError
from bottega.gateway.fleet.join_limits import MAX_NAMELESS
from bottega.gateway.jobs.job import MOST_ATTEMPTS
from bottega.rpc.address import Address
from bottega.rpc.security.tenant_file import read_tenants
from bottega.rpc.server import ListenerConfig, ServerConfig
from bottega.strict import STRICT

DEFAULT_ADDRESS = "127.0.0.1:8470"
DEFAULT_METRICS_ADDRESS = "127.0.0.1:8471"
DEFAULT_FLEET_ADDRESS = "127.0.0.1:8472"

AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServerConfig(ServerConfig):
    """The gateway is where everybody looks for it."""

    listen: Address = DEFAULT_ADDRESS
    metrics_listen: Address = DEFAULT_METRICS_ADDRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(ListenerConfig):
    """The port where services join: for the suite's own machines, and not for those who want pictures.

    max_message_mib: the longest registration, and the longest load, are well below one.
    max_members_per_peer: services that may be in the fleet at once from one host.
    joins_per_s: of one host, of services that are no members; max_members_per_peer of them may come together.
    joins_per_s_by_name: of one name, and over one connection; eight times as many may come together.
    """

    listen: Address = DEFAULT_FLEET_ADDRESS
    max_message_mib: Annotated[int, Field(ge=2, le=1024)] = 2
    max_calls: AtLeastOne = 1024
    max_members_per_peer: AtLeastOne = 160
    joins_per_s: Seconds = 16.0
    joins_per_s_by_name: Seconds = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything about one gateway.

    name: by which the fleet lists it.
    fleet: the listener where services join, and are listed.
    tenants: file of the tenants and what is kept of their API keys, which `bottega tenants` writes: then every call to
        the gateway's own port has to show a key, and sees what is its tenant's. It is read again when it changes.
        Empty: nobody is asked who they are, and everything is one tenant's.
    tenant_metrics: of so many tenants, the first that have a job, metrics are kept by name; those of all others are
        added up. 0: none by tenant.
    max_queued, max_queued_bytes: bounds on the jobs that wait for a worker, in number and in request bytes.
    slo_scale: a tenant's jobs are served by when they are due, which is so many times what they take alone after they
        came, or their own deadline if that is earlier: a short one goes before a long one that came shortly before it.
        Nor does a job begin beside one that would be late by it, unless it adds much less to a turn than it takes
        alone, or several wait behind it. 0: first come, first served.
    priority_head_start_s: a job of high priority is served as if it were due so much earlier, one of low priority so
        much later: before and behind others of its tenant alone.
    state: folder of its jobs and images, which nobody else may use; empty is "gateway" in $BOTTEGA_STATE, else in
        bottega in $XDG_STATE_HOME, else in ~/.local/state/bottega.
    max_jobs, jobs_bytes, jobs_ttl_s: bounds on the jobs that are remembered after they ended; also the
        window in which a request_id attaches to its first run, over restarts too. More than max_jobs in jobs_ttl_s make
        it shorter: for cancelled and failed jobs first, then for those of the host that has the most.
    hold_s: how long, after a restart, a job that was running waits for its worker to come back with it.
    results_bytes, results_ttl_s: bounds on finished images, and on what keep_for_editing keeps of them, on the disk,
        which needs that room: 4 GiB are 2,400 of SDXL, or 500 with the latents of 50 steps. What has gone is drawn
        again for its request_id, with the same seed. Where they take more, the tenant that has most loses its oldest:
        no other does that has no more than its share, results_bytes divided by the tenants that have images.
    max_result_bytes: of one job's images together; at most results_bytes, so that a job has all of them when it ends.
        Latents are kept in what is left of it.
    traces_bytes: of what `bottega trace` shows, in memory: of the jobs that ran last, some KiB each.
    lease_s: silence after which a service has left; with a sweep every tenth of a second a silent one
        is out within 2 s.
    model_grace_s: how long jobs of a model, or with a ControlNet, are taken and kept while nobody serves it, at least:
        for twice what the longest of the last starts of the model's workers took, or the start of the ControlNet's
        server, where that is more, up to 600 seconds. Starts from before its own restart the gateway does not know.
    max_members: services that may be in the fleet at once, of all kinds.
    max_attempts: workers that are cut off with one job, or die with it and others, before it fails; one that is
        stopping or full is none of them. Two that die with it alone make it poison, whatever is said here.
    identical_results: whether a request that gives its seed, and is identical to one that was drawn, is answered with
        the stored pictures of that; a request may say otherwise.
    codec_processes, max_image_bytes, max_image_pixels: for input images. Of several processes (17 MiB each at rest) one
        looks at small images only, so that large ones hold up nobody else.
    codec_idle_s: without an input image, after which codec processes end, until the next one; null keeps them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(min_length=1, max_length=128)] = "gateway"
    state: str = ""
    server: GatewayServerConfig = field(default_factory=GatewayServerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    tenants: str = ""
    tenant_metrics: Annotated[int, Field(ge=0, le=1000)] = 0
    max_queued: AtLeastOne = 256
    max_queued_bytes: AtLeastOne = 512 << 20
    slo_scale: Annotated[float, Field(ge=0.0, le=100.0)] = 2.0
    priority_head_start_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 60.0
    max_jobs: AtLeastOne = 10_000
    jobs_bytes: AtLeastOne = 128 << 20
    jobs_ttl_s: Seconds = 3600.0
    hold_s: Seconds = 3.0
    results_bytes: AtLeastOne = 4 << 30
    results_ttl_s: Seconds = 3600.0
    max_result_bytes: AtLeastOne = 128 << 20
    traces_bytes: AtLeastOne = 32 << 20
    lease_s: Seconds = 1.5
    model_grace_s: Seconds = 30.0
    max_members: AtLeastOne = 256
    max_attempts: Annotated[int, Field(ge=1, le=MOST_ATTEMPTS)] = 8
    identical_results: bool = True
    codec_processes: AtLeastOne = 2
    max_image_bytes: AtLeastOne = 8 << 20
    max_image_pixels: AtLeastOne = 4096 * 4096
    codec_idle_s: Seconds | None = None

    def __post_init__(self) -> None:
        # Members, as many that come back, and those that have not said yet who they are.
        needed = 2 * self.max_members + MAX_NAMELESS
        if self.fleet.max_calls < needed:
            raise ValueError(
                f"fleet.max_calls is {self.fleet.max_calls}; at least twice max_members and {MAX_NAMELESS}: {needed}"
            )
        if self.max_result_bytes > self.results_bytes:
            raise ValueError(
                f"max_result_bytes is {self.max_result_bytes}; at most results_bytes, which is {self.results_bytes}"
            )


def check_tenants(config: GatewayConfig) -> None:
    """Raise ConfigError where the file of tenants cannot be used."""
    if config.tenants:
        try:
            read_tenants(Path(config.tenants))
        except ConfigError as error:
            raise ConfigError(f"tenants: {error.message}") from None
