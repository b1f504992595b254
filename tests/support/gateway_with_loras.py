"""A real gateway with a real LoRA store in its fleet; whoever works there is the test's matter."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.v1 import lora_pb2 as pb
from tests.support import running_loras
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_loras import lora_file

_BASES = {"miniature": "miniature", "other": "miniature"}


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """A gateway and its LoRA store, which has `ink` for the miniature and `wash` for another model."""

    gateway: Running
    store: running_loras.Running
    ink: pb.StoredLora
    wash: pb.StoredLora


@contextlib.asynccontextmanager
async def lora_house(folder: Path, *, lease_s: float = 30.0, **config: Any) -> AsyncIterator[House]:
    """lease_s: of the store. config: of the gateway."""
    async with running_gateway(**config) as gateway, lora_store(gateway, folder / "store", lease_s=lease_s) as store:
        ink = await store.upload("ink", lora_file(folder))
        wash = await store.upload("wash", lora_file(folder, seed=1), base="other")
        yield House(gateway=gateway, store=store, ink=ink, wash=wash)


@contextlib.asynccontextmanager
async def lora_store(
    gateway: Running, folder: Path, *, name: str = "loras", bases: Mapping[str, str] = _BASES, **config: Any
) -> AsyncIterator[running_loras.Running]:
    settings = running_loras.config(
        **{"lease_s": 30.0} | config, gateway=gateway.fleet_address, name=name, bases=dict(bases)
    )
    async with running_loras.running(folder, settings) as store:
        await gateway.until_joined(name)
        yield store
