"""Tenants in a file, and calls of theirs to a running gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bottega.rpc.channel import open_channel
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.security.tenant_file import Tenant, change_tenants
from bottega.v1 import image_pb2_grpc
from tests.support.running_gateway import Running


def add_tenant(file: Path, name: str, **facts: Any) -> str:
    """Its key. facts: of the tenant, such as its grants."""
    key, parts = new_key()
    change_tenants(file, lambda tenants: (*tenants, Tenant(name=name, **facts).rotated(parts, keep_old=False)))
    return key


@contextlib.asynccontextmanager
async def calling(house: Running, key: str) -> AsyncIterator[Running]:
    """The same gateway for a caller that shows a key."""
    channel = open_channel(house.address, api_key=key)
    images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
    yield replace(house, channel=channel, images=images)
    await channel.close()
