"""The configuration of a gateway, with its defaults."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.addons.interface.views import MAX_ATTEMPTS
from bottega.config import parse
from bottega.content_credentials import PictureSigner
from bottega.errors import AddressRefused, ConfigError
from bottega.gateway.fleet.join_limits import MAX_NAMELESS
from bottega.outside_rules import OutsideRules
from bottega.rpc.security.private_files import FILES_OF_UNITS, read_private, read_public
from bottega.rpc.security.tenant_file import MAX_WEBHOOK_SECRETS, Tenant, TenantWebhooks, read_tenants
from bottega.rpc.server_config import Address, HostPort, ListenerConfig, ServerConfig
from bottega.rules import MAX_START_S
from bottega.storage.objects import ObjectsAddress, ObjectsEndpoint
from bottega.strict import STRICT

DEFAULT_ADDRESS = "127.0.0.1:8470"
DEFAULT_METRICS_ADDRESS = "127.0.0.1:8471"
DEFAULT_FLEET_ADDRESS = "127.0.0.1:8472"

DATABASE_SCHEMES = ("postgresql://", "postgres://")
"""How the URL of a database begins."""
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServerConfig(ServerConfig):
    """The listener for callers of the API. Clients use its default addresses."""

    listen: Address = DEFAULT_ADDRESS
    metrics_listen: Address = DEFAULT_METRICS_ADDRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(ListenerConfig):
    """The listener where services join the fleet. Only services of the suite use it, not clients."""

    listen: Address = DEFAULT_FLEET_ADDRESS
    max_message_mib: Annotated[int, Field(ge=2, le=1024)] = 2
    """Upper bound on the size of one message, in MiB. The longest registration and report are well below 1 MiB."""
    max_calls: AtLeastOne = 1024
    max_members_per_peer: AtLeastOne = 160
    """Upper bound on the number of fleet members from one host."""
    joins_per_s: Seconds = 16.0
    """Upper bound on joins per second from one host, counting only services that are not members yet.

    A burst of max_members_per_peer joins is allowed.
    """
    joins_per_s_by_name: Seconds = 2.0
    """Upper bound on joins per second by name and by connection. Bursts of eight times as many are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningConfig:
    """The certificate that signs finished pictures (Content Credentials, C2PA). It needs the package c2pa-python."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    certificate: str = ""
    """File with the certificate, then the intermediate ones, without the root, in PEM. Empty: nothing is signed.

    Its key usage is digitalSignature, its extended key usage emailProtection or that of C2PA. Renewed files are used at
    once. When the certificate has expired, new jobs are refused.
    """
    key: str = ""
    """File with its private key, in PEM, which only the gateway's user can read."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("signing needs both certificate and key, or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhooksConfig(OutsideRules):
    """Webhooks: which receivers may be called, and how often.

    They are off until hosts are listed. An operator lists hosts, because a webhook sends data of jobs wherever a caller
    says; "*" is for tenants that are strangers and have receivers of their own.
    """

    secrets: str = ""
    """File with the secret that signs webhooks (whsec_...), on a gateway without tenants; `tenants` has theirs.

    During a rotation it has two lines, and each webhook has two signatures.
    """
    authorities: str = ""
    """File with certificates of further authorities, in PEM, for receivers in your own network.

    Empty: well-known ones alone.
    """
    public_url: str = ""
    """URL of the HTTP API, with which the payload's URLs of images begin. Empty: they are paths."""
    delivery_s: Seconds = 15.0
    """Upper bound on the seconds of one delivery, from the look-up of the host's name to the answer."""
    first_retry_s: Seconds = 5.0
    """Seconds after which a delivery that failed is repeated; twice as many after each further failure, with jitter."""
    max_retry_s: Seconds = 3600.0
    """Upper bound on the seconds between two deliveries of an event."""
    give_up_s: Seconds = 86_400.0
    """Seconds for which delivery is retried. Afterwards the event is delivered only by `bottega webhooks replay`."""
    max_deliveries: AtLeastOne = 32
    """Upper bound on deliveries at the same time."""
    max_deliveries_per_tenant: AtLeastOne = 8
    """Upper bound on deliveries of one tenant at the same time."""
    max_deliveries_per_host: AtLeastOne = 8
    """Upper bound on deliveries to one host at the same time."""
    max_waiting: AtLeastOne = 100_000
    """Upper bound on the number of events that wait for their delivery. Further ones wait until there is room."""
    max_waiting_per_tenant: AtLeastOne = 10_000
    """Upper bound on the number of events of one tenant that wait."""
    max_dead: AtLeastOne = 1000
    """Upper bound on the events of one tenant that were given up. Beyond it the oldest is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """How many workers and ControlNet servers a model should have. `bottega scale` starts and stops them."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    wait_s: Seconds = 10.0
    """Seconds within which jobs that wait should be done. If the present workers need longer, more are started."""
    keep_s: Seconds = 60.0
    """Seconds for which fewer workers must have been enough before some are stopped; their start time if longer."""
    start_s: Annotated[float, Field(gt=0, le=MAX_START_S)] = 30.0
    """Seconds that a worker is expected to need for its start, until a start was measured."""
    controlnet_jobs: AtLeastOne = 8
    """Number of jobs that one ControlNet server should serve at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The configuration of a gateway."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(min_length=1, max_length=128)] = "gateway"
    """Name of the gateway in the list of fleet members."""
    state: str = ""
    """Folder in which the gateway stores jobs and images.

    No other gateway may use it. Empty: gateway/ in $BOTTEGA_STATE, else in bottega/ in $XDG_STATE_HOME, else in
    ~/.local/state/bottega.
    """
    jobs: str = ""
    """URL of a PostgreSQL database (15 or newer) that keeps the jobs, such as postgresql://bottega@db.example/bottega.

    All gateways of one database have the same jobs. The password comes from a file (PGPASSFILE) or from PGPASSWORD.
    Empty: the jobs are in a file in the folder `state`.
    """
    advertised: HostPort = ""
    """Address of `server.listen` for other gateways of the database, host:port. Empty: `server.listen`."""
    server: GatewayServerConfig = field(default_factory=GatewayServerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    """The listener where services join the fleet and where the fleet is listed."""
    tenants: str = ""
    """File of tenants and of the hashes of their API keys, or the URL of a database with them (postgresql://...).

    `bottega tenants` writes both, and gateways follow changes within seconds. Several gateways need the database. If
    this is set, every call to the gateway's own port needs an API key and sees only what belongs to the tenant of that
    key. Empty: callers need no key, and everything belongs to one tenant.
    """
    tenant_metrics: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of tenants with metrics of their own: the first ones that send a job.

    The metrics of all other tenants are added up. 0: no metrics by tenant.
    """
    signing: SigningConfig = field(default_factory=SigningConfig)
    webhooks: WebhooksConfig = field(default_factory=WebhooksConfig)
    """POSTs to URLs of callers when their jobs end."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    max_queued: AtLeastOne = 256
    """Upper bound on the number of jobs that wait for a worker."""
    max_queued_bytes: AtLeastOne = 512 << 20
    """Upper bound on the total request bytes of all jobs that wait for a worker."""
    slo_scale: Annotated[float, Field(ge=0.0, le=100.0)] = 2.0
    """Target latency of a job, as a multiple of the time that the job takes on a worker of its own.

    A job is due at this target, or at its own deadline if that is earlier. Jobs of one tenant are served in the order
    in which they are due. A job does not start beside a running job that would then miss its target, unless it adds
    much less time to a forward pass than it takes alone, or several jobs wait behind it. 0: first come, first served.
    """
    priority_head_start_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 60.0
    """Seconds by which a priority moves a job in the queue of its tenant: high forward, low back."""
    max_jobs: AtLeastOne = 10_000
    """Upper bound on the number of ended jobs that are kept.

    If more jobs end within jobs_ttl_s, cancelled and failed jobs are deleted first, then jobs of the host that has
    most.
    """
    jobs_bytes: AtLeastOne = 128 << 20
    """Upper bound on the total bytes of ended jobs that are kept, without their images."""
    jobs_ttl_s: Seconds = 3600.0
    """Seconds for which an ended job is kept.

    Until then a repeated request with the same request_id returns the first job, also after a restart.
    """
    hold_s: Seconds = 3.0
    """Seconds after a restart for which a running job waits for its worker to reconnect, before it is queued again."""
    results_bytes: AtLeastOne = 4 << 30
    """Upper bound on the disk space of finished images and of the latents that are kept with them for edits.

    The disk needs that much space: 4 GiB hold 2,400 SDXL images, or 500 with the latents of 50 steps. If a request with
    the same request_id comes after its image was evicted, the image is drawn again, with the same seed. If space runs
    out, the tenant that uses most loses its oldest images; a tenant that uses no more than its share (results_bytes
    divided by the number of tenants that have images) loses none.
    """
    results_ttl_s: Seconds = 3600.0
    """Seconds for which finished images are kept."""
    objects: ObjectsAddress = ""
    """Where finished images and the latents kept with them are stored: s3://bucket/prefix. Empty: files in `state`.

    Checkpoints of running jobs are stored there as well, so that a job goes on from the last one if its worker and its
    gateway are lost together; without it, gateways have them in memory only. Several gateways may share it, with the
    same results_bytes and results_ttl_s. Endpoint, region, credentials and encryption come from the environment:
    AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SERVER_SIDE_ENCRYPTION (AES256 or
    aws:kms), AWS_SSE_KMS_KEY_ID. It needs the package obstore.
    """
    objects_local_bytes: AtLeastOne = 1 << 30
    """Upper bound on the disk space of images of `objects` that are kept in `state` as well, to be read faster."""
    objects_public_endpoint: ObjectsEndpoint = ""
    """URL by which callers reach the S3 server, such as https://s3.example.com, to answer with URLs of images.

    Anybody who has such a URL can read the image for an hour. Empty: images are sent by the gateway alone.
    """
    max_result_bytes: AtLeastOne = 128 << 20
    """Upper bound on the total bytes of the images of one job.

    At most results_bytes, so that a job still has all of its images when it ends. Latents are kept in the space that
    the images leave.
    """
    traces_bytes: AtLeastOne = 32 << 20
    """Upper bound on the memory of traces (`bottega trace`): some KiB for each job, newest jobs first."""
    lease_s: Seconds = 1.5
    """Seconds without a report after which a service is removed from the fleet.

    The gateway checks when a lease is about to end, so a silent service is removed within 2 s. When there have been no
    jobs for 10 s, services report a tenth as often and the lease is ten times as long, until the next job comes.
    """
    model_grace_s: Seconds = 30.0
    """Shortest time in seconds for which jobs are accepted and kept while no service serves their model or ControlNet.

    If twice the longest recent start of the model's workers (or of the ControlNet's server) is longer, that time
    counts, up to 600 s. The gateway does not know starts from before its own restart.
    """
    max_members: AtLeastOne = 256
    """Upper bound on the number of services of all kinds in the fleet."""
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] = 8
    """Number of workers that may die or disconnect while they run a job, before the job fails.

    A worker that is stopping or full does not count. If two workers die while the job runs alone, it fails at once.
    """
    identical_results: bool = True
    """Whether a request with a seed that equals an earlier request is answered with that request's stored images.

    A request can override this.
    """
    codec_processes: AtLeastOne = 2
    """Number of processes that decode input images; each takes 17 MiB while idle.

    With several, one takes only small images, so that large ones do not delay them.
    """
    max_image_bytes: AtLeastOne = 8 << 20
    """Upper bound on the bytes of one encoded input image."""
    max_image_pixels: AtLeastOne = 4096 * 4096
    """Upper bound on the pixels of one input image."""
    codec_idle_s: Seconds | None = None
    """Seconds without an input image after which the codec processes end until the next image. null: they never end."""

    def __post_init__(self) -> None:
        # Members, as many that reconnect, and joins that have not sent their registration yet.
        needed = 2 * self.max_members + MAX_NAMELESS
        if self.fleet.max_calls < needed:
            raise ValueError(
                f"fleet.max_calls is {self.fleet.max_calls}; it must be at least {needed}, "
                f"twice max_members plus {MAX_NAMELESS}"
            )
        if self.jobs and not self.jobs.startswith(DATABASE_SCHEMES):
            raise ValueError("jobs must be the URL of a PostgreSQL database, postgresql://..., or empty")
        if self.max_result_bytes > self.results_bytes:
            raise ValueError(
                f"max_result_bytes is {self.max_result_bytes}; must be at most results_bytes, {self.results_bytes}"
            )


def read_signer(config: GatewayConfig) -> PictureSigner | None:
    """Return the signer of finished pictures; None if they are not signed. Raise ConfigError if it cannot be used."""
    files = config.signing
    if not files.certificate:
        return None
    try:
        certificate, key = (Path(path).expanduser() for path in (files.certificate, files.key))
        return PictureSigner(
            read_public(certificate), read_private(key), version=importlib.metadata.version("bottega-services")
        )
    except ConfigError as error:
        raise ConfigError(f"signing: {error.message}") from None


def check_files(config: GatewayConfig) -> None:
    """Raise ConfigError if the file of tenants, the certificate, or the secrets of webhooks cannot be used.

    Also if the client of PostgreSQL or S3 is missing. Files that only the running unit can see are not checked.
    """
    _check_tenants(config)
    if config.jobs:
        from bottega.storage.postgresql import PostgresDatabase

        PostgresDatabase(config.jobs, application=config.name)
    if config.objects:
        import bottega.storage.s3  # noqa: F401 - says what to install if obstore is missing
    if not config.signing.key.startswith(FILES_OF_UNITS):
        read_signer(config)
    if not config.webhooks.secrets.startswith(FILES_OF_UNITS):
        read_webhook_secrets(config)


def _check_tenants(config: GatewayConfig) -> None:
    """Raise ConfigError if the file of tenants cannot be used."""
    if config.tenants and not config.tenants.startswith(DATABASE_SCHEMES):
        try:
            for tenant in read_tenants(Path(config.tenants)):
                _check_webhook(tenant, config.webhooks)
        except ConfigError as error:
            raise ConfigError(f"tenants: {error.message}") from None


def _check_webhook(tenant: Tenant, allowed: WebhooksConfig) -> None:
    """Raise ConfigError if webhooks are on, but not for the URL of a tenant."""
    if allowed.allows_any and tenant.webhooks.url:
        try:
            allowed.check(tenant.webhooks.url)
        except AddressRefused as error:
            raise ConfigError(f"the webhook of {tenant.name}: {error.message} (webhooks.hosts)") from None


def read_webhook_secrets(config: GatewayConfig) -> TenantWebhooks:
    """Return the secrets for webhooks of a gateway without tenants. Raise ConfigError if there should be some."""
    if config.tenants or not config.webhooks.allows_any:
        return TenantWebhooks()
    if not config.webhooks.secrets:
        raise ConfigError("webhooks.secrets: name a file with a secret to sign with: bottega webhooks secret > FILE")
    lines = read_private(Path(config.webhooks.secrets).expanduser()).decode(errors="replace").split()
    if not 1 <= len(lines) <= MAX_WEBHOOK_SECRETS:
        raise ConfigError(f"webhooks.secrets: {config.webhooks.secrets} must have 1 or {MAX_WEBHOOK_SECRETS} lines")
    return parse(TenantWebhooks, {"secrets": lines}, source=config.webhooks.secrets)
