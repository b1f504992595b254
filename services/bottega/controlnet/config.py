"""The configuration of a ControlNet server and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict

from bottega.device_names import DeviceName
from bottega.rpc.server_config import DeviceLinksConfig
from bottega.rpc.service_config import AtLeastOne, MemberConfig, NotNegative, Seconds
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetEngineConfig:
    """Settings of a ControlNet server's engine process."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "links_listen": "links.listen",
        "links_advertised": "links.advertised",
        "links_socket": "links.socket",
        "links_seal": "links.seal",
        "device_links": "links.devices",
    }

    device: DeviceName = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the workers' models.

    auto: each worker's own; a ControlNet is then loaded once for each data type in use.
    """
    threads: NotNegative = 0
    """Threads of torch. 0: torch decides."""
    exclusive_cores: bool = False
    """The engine's cores run nothing else.

    Its threads then wait for each other actively, which is faster, and slower if the cores are shared after all.
    """
    device_memory_mib: NotNegative = 0
    """Bound in MiB on the device memory of ControlNets, forward passes and links together.

    0: what is free when the engine starts, less a reserve. On a CPU it is 0.
    """
    budget_bytes: AtLeastOne = 8 << 30
    """Bound on the bytes of weights that are loaded at once; three quarters of the device's memory if that is less."""
    max_rows: AtLeastOne = 16
    """Bound on the rows of one forward pass. A guided step has two for each of its images."""
    fixed_rows: NotNegative = 0
    """Number of rows of every forward pass; smaller ones are padded.

    Images are then equal byte for byte whatever runs beside them. 0: off.
    """
    links: DeviceLinksConfig = field(default_factory=DeviceLinksConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetConfig(MemberConfig):
    """Settings of a ControlNet server."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {"start_s": "start_stall_s"}

    engine: ControlNetEngineConfig = field(default_factory=ControlNetEngineConfig)
    engine_on_demand: bool = False
    """Start the engine with the first request that needs it, and let that request wait.

    false: start it with the server. An idle engine takes 350 MiB. A server that hosts ControlNets that callers added
    starts it at once.
    """
    controlnets: dict[str, str] = field(default_factory=dict)
    """Folders of hosted ControlNets in Diffusers' layout, by name.

    miniature/edges and miniature/layout belong to the embedded model.
    """
    left_out: dict[str, str] = field(default_factory=dict)
    """ControlNets that are not hosted, and why, by name.

    The fleet lists them. `bottega up` writes here which files beside the ControlNets of a model's folder it cannot use.
    """
    root: str = ""
    """Folder that must contain the folders that callers add. Empty: callers cannot add ControlNets."""
    catalogue: str = ""
    """SQLite file of added ControlNets and measured profiles.

    Only one server at a time may use it. Empty: controlnets.db in Bottega's state folder.
    """
    start_stall_s: Seconds = 120.0
    """Seconds without progress of the engine's start after which the engine counts as hung and is replaced.

    Loading ControlNets has its own limit, and systemd waits as long.
    """
    hang_s: Seconds = 60.0
    """Seconds without a message of a ready engine after which it is replaced."""
    stall_s: Seconds = 120.0
    """Seconds without a forward pass, while steps wait, after which the engine is replaced."""
