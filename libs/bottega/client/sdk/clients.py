"""The two clients, which combine the calls to the gateway with the methods of every add-on.

The `sdk` module of each add-on's client (bottega.client.addons) has two classes of methods, which are bases here. This
is the only place that lists the client's add-ons by name.
"""

from __future__ import annotations

from bottega.addons.cache.client.sdk import AsyncCacheMethods, CacheMethods
from bottega.addons.controlnets.client.sdk import AsyncControlNetMethods, ControlNetMethods
from bottega.addons.edits.client.sdk import AsyncEditMethods, EditMethods
from bottega.addons.loras.client.sdk import AsyncLoraMethods, LoraMethods


class AsyncClient(AsyncCacheMethods, AsyncControlNetMethods, AsyncLoraMethods, AsyncEditMethods):
    """A connection to a gateway, for asyncio.

    Make it inside a running event loop, and close it (`async with` does): that cancels pictures that it has begun and
    not finished. Every method raises classes of bottega.errors.

    Args:
        address: host:port of the gateway. The default is $BOTTEGA_ADDRESS, else the suite that runs here (`bottega
            up`), else 127.0.0.1:8470. If nothing answers there, a warning is logged after 1.5 s, and the call goes on
            trying. With several gateways a list of IP addresses with ports, a text with commas between them, or one
            DNS name that resolves to all of them. Calls then go round the gateways that serve, and a call or a stream
            whose gateway dies goes on at another one.
        fleet_address: host:port of the gateway's listener for services; with several gateways as above. fleet() and the
            methods about ControlNets, LoRAs, caches and recordings need it; drawing does not. The default is
            $BOTTEGA_FLEET, else the suite that runs here, else port 8472 of each gateway's machine.
        api_key: Key for a gateway that asks for one. The default is $BOTTEGA_API_KEY; "" sends none.
        tls: Certificates. The default is the files that $BOTTEGA_TLS_AUTHORITY, _CERTIFICATE and _KEY name; without
            them connections are not encrypted.
        timeout_s: Default time-out of a call in seconds, above 0.
        retry: How to retry while the gateway is UNAVAILABLE or busy; other errors are not retried.
    """


class Client(CacheMethods, ControlNetMethods, LoraMethods, EditMethods):
    """A connection to a gateway, without asyncio. AsyncClient documents the arguments.

    It may be shared between threads. Close it (`with` does); otherwise it closes when it is garbage-collected.
    """

    _kind = AsyncClient
