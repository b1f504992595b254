"""How the approximate caches of a fleet are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bottega.client.addons.cache.addon import ADD_ON
from bottega.client.addons.service_calls import ServiceCalls
from bottega.errors import NoCache
from bottega.v1.cache_pb2_grpc import CacheServiceStub

if TYPE_CHECKING:
    from bottega.v1.cache_pb2_grpc import CacheServiceAsyncStub

# A cache works its records off one after the other, and says so itself after 30 s.
CALL_S = 40.0
CACHES: ServiceCalls[CacheServiceAsyncStub] = ServiceCalls(add_on=ADD_ON, stub=CacheServiceStub, unavailable=NoCache)
