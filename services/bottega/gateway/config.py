"""What a gateway may be told, and the defaults. It knows no file and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from bottega.config import STRICT
from bottega.rpc.server import ServerConfig

DEFAULT_ADDRESS = "127.0.0.1:8470"
DEFAULT_METRICS_ADDRESS = "127.0.0.1:8471"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything about one gateway.

    max_queued, max_queued_bytes: bounds on the jobs that wait for a worker, in number and in request bytes.
    max_jobs, jobs_bytes, jobs_ttl_s: bounds on the jobs that are remembered after they ended; also the
        window in which a request_id attaches to its first run.
    results_bytes, results_ttl_s: bounds on finished images.
    max_result_bytes: of one job's images together.
    lease_s: silence after which a service has left; with a sweep every tenth of a second a silent one
        is out within 2 s.
    model_grace_s: how long jobs of a model are taken and kept while no worker serves it.
    max_attempts: attempts at one job before a lost worker fails it.
    codec_processes, max_image_bytes, max_image_pixels: for input images.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str = "gateway"
    server: ServerConfig = field(
        default_factory=lambda: ServerConfig(listen=DEFAULT_ADDRESS, metrics_listen=DEFAULT_METRICS_ADDRESS)
    )
    max_queued: int = 256
    max_queued_bytes: int = 512 << 20
    max_jobs: int = 10_000
    jobs_bytes: int = 128 << 20
    jobs_ttl_s: float = 3600.0
    results_bytes: int = 512 << 20
    results_ttl_s: float = 3600.0
    max_result_bytes: int = 128 << 20
    lease_s: float = 1.5
    model_grace_s: float = 30.0
    max_attempts: int = 3
    codec_processes: int = 1
    max_image_bytes: int = 8 << 20
    max_image_pixels: int = 4096 * 4096
