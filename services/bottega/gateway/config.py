"""The configuration of a gateway, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.errors import ConfigError
from bottega.gateway.fleet.join_limits import MAX_NAMELESS
from bottega.gateway.jobs.job import MAX_ATTEMPTS
from bottega.rpc.address import Address
from bottega.rpc.security.tenant_file import read_tenants
from bottega.rpc.server_config import ListenerConfig, ServerConfig
from bottega.strict import STRICT

DEFAULT_ADDRESS = "127.0.0.1:8470"
DEFAULT_METRICS_ADDRESS = "127.0.0.1:8471"
DEFAULT_FLEET_ADDRESS = "127.0.0.1:8472"

AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServerConfig(ServerConfig):
    """The gateway's own listener, on the addresses where clients look for it."""

    listen: Address = DEFAULT_ADDRESS
    metrics_listen: Address = DEFAULT_METRICS_ADDRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(ListenerConfig):
    """The listener where services join the fleet: for the suite's own machines, not for clients."""

    listen: Address = DEFAULT_FLEET_ADDRESS
    max_message_mib: Annotated[int, Field(ge=2, le=1024)] = 2
    """Bound on one message in MiB. The longest registration and report are well below 1 MiB."""
    max_calls: AtLeastOne = 1024
    max_members_per_peer: AtLeastOne = 160
    """Bound on services of one host that are in the fleet at once."""
    joins_per_s: Seconds = 16.0
    """Bound on joins per second of one host, for services that are not members yet.

    max_members_per_peer may come at once.
    """
    joins_per_s_by_name: Seconds = 2.0
    """Bound on joins per second of one name, and over one connection. Eight times as many may come at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Settings of a gateway."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(min_length=1, max_length=128)] = "gateway"
    """Name of the gateway in the list of the fleet."""
    state: str = ""
    """Folder of jobs and images.

    No other gateway may use it. Empty: gateway/ in $BOTTEGA_STATE, else in bottega/ in $XDG_STATE_HOME, else in
    ~/.local/state/bottega.
    """
    server: GatewayServerConfig = field(default_factory=GatewayServerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    """The listener where services join the fleet and where the fleet is listed."""
    tenants: str = ""
    """File of tenants and of hashes of their API keys, written by `bottega tenants` and read again when it changes.

    With it every call to the gateway's own port needs a key and sees only what belongs to its tenant. Empty: callers
    need no key, and everything belongs to one tenant.
    """
    tenant_metrics: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of tenants whose metrics are kept by name: the first ones that have a job.

    Metrics of all others are added up. 0: no metrics by tenant.
    """
    max_queued: AtLeastOne = 256
    """Bound on the number of jobs that wait for a worker."""
    max_queued_bytes: AtLeastOne = 512 << 20
    """Bound on the request bytes of all jobs that wait for a worker."""
    slo_scale: Annotated[float, Field(ge=0.0, le=100.0)] = 2.0
    """Target latency of a job as a multiple of the time that the job takes alone.

    A job is due at this target, or at its own deadline if that is earlier. Jobs of one tenant are served in the order
    in which they are due. A job does not start beside one that would then miss its target, unless it adds much less
    time to a turn than it takes alone, or several jobs wait behind it. 0: first come, first served.
    """
    priority_head_start_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 60.0
    """Seconds by which a priority moves a job among the jobs of its tenant. High moves it forward, low back."""
    max_jobs: AtLeastOne = 10_000
    """Bound on the number of jobs that are kept after they ended.

    If more end within jobs_ttl_s, cancelled and failed jobs are forgotten first, then jobs of the host that has most.
    """
    jobs_bytes: AtLeastOne = 128 << 20
    """Bound on the bytes of jobs that are kept after they ended."""
    jobs_ttl_s: Seconds = 3600.0
    """Seconds for which an ended job is kept.

    In this time a repeated request_id returns the first job, also after a restart.
    """
    hold_s: Seconds = 3.0
    """Seconds after a restart in which a job that was running waits for its worker to come back."""
    results_bytes: AtLeastOne = 4 << 30
    """Bound on the disk space of finished images and of what is kept of them for edits.

    The disk needs that room: 4 GiB hold 2,400 SDXL images, or 500 with the latents of 50 steps. An evicted image is
    drawn again, with the same seed, for its request_id. If space runs out, the tenant that uses most loses its oldest
    images; a tenant that uses no more than its share (results_bytes divided by the tenants that have images) loses
    none.
    """
    results_ttl_s: Seconds = 3600.0
    """Seconds for which finished images are kept."""
    max_result_bytes: AtLeastOne = 128 << 20
    """Bound on the images of one job.

    At most results_bytes, so that a job has all of its images when it ends. Latents are kept in the room that the
    images leave.
    """
    traces_bytes: AtLeastOne = 32 << 20
    """Bound on the memory of traces (`bottega trace`), some KiB for each of the jobs that ran last."""
    lease_s: Seconds = 1.5
    """Seconds of silence after which a service is removed from the fleet.

    The gateway checks when a lease is about to end, so a silent service is out within 2 s. When there have been no jobs
    for 10 s, services report a tenth as often and the lease is ten times as long, until the next job comes.
    """
    model_grace_s: Seconds = 30.0
    """Least seconds for which jobs are accepted and kept while nobody serves their model or ControlNet.

    Twice the longest of the last starts of the model's workers (or of the ControlNet's server), if that is longer, up
    to 600 s. The gateway does not know starts from before its own restart.
    """
    max_members: AtLeastOne = 256
    """Bound on services of all kinds that are in the fleet at once."""
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] = 8
    """Number of workers that are lost with a job before the job fails.

    A worker that is stopping or full does not count. Two workers that die while the job runs alone make it fail at
    once.
    """
    identical_results: bool = True
    """Answer a request that gives its seed and equals one that was drawn with the stored images of that one.

    A request can override this.
    """
    codec_processes: AtLeastOne = 2
    """Processes that decode input images, 17 MiB each at rest.

    With several, one takes only small images, so that large ones do not delay them.
    """
    max_image_bytes: AtLeastOne = 8 << 20
    """Bound on the bytes of one input image."""
    max_image_pixels: AtLeastOne = 4096 * 4096
    """Bound on the pixels of one input image."""
    codec_idle_s: Seconds | None = None
    """Seconds without an input image after which codec processes end until the next image. null keeps them."""

    def __post_init__(self) -> None:
        # Members, as many that reconnect, and joins that have not sent their registration yet.
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
    """Raise ConfigError if the file of tenants cannot be used."""
    if config.tenants:
        try:
            read_tenants(Path(config.tenants))
        except ConfigError as error:
            raise ConfigError(f"tenants: {error.message}") from None
