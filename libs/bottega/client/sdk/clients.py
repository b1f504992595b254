"""The two clients that users make: what is asked of the gateway, and the methods of every add-on service.

Each add-on is a package of bottega.client.addons; its client module has two classes of methods, which are bases here:
the one place that names every add-on of the client.
"""

from __future__ import annotations

from bottega.client.addons.cache.client import AsyncCacheMethods, CacheMethods
from bottega.client.addons.controlnets.client import AsyncControlNetMethods, ControlNetMethods
from bottega.client.addons.loras.client import AsyncLoraMethods, LoraMethods
from bottega.client.addons.templates.client import AsyncTemplateMethods, TemplateMethods


class AsyncClient(AsyncCacheMethods, AsyncControlNetMethods, AsyncLoraMethods, AsyncTemplateMethods):
    """A connection to a gateway.

    address: host:port; when absent $BOTTEGA_ADDRESS, else that of the suite that runs here (`bottega up`), else
        127.0.0.1:8470. While nothing answers there, a warning is logged after 1.5 s, and the call goes on trying.
    fleet_address: host:port where the gateway lists its services, which fleet() and the methods about ControlNets,
        LoRAs, caches and templates need; drawing needs it not. $BOTTEGA_FLEET when absent, else that of the suite that
        runs here, else port 8472 of the gateway's machine.
    api_key: shown to a gateway that asks for one; $BOTTEGA_API_KEY when absent, and "" is none.
    tls: by which client and gateway know each other; what $BOTTEGA_TLS_AUTHORITY, _CERTIFICATE and _KEY name when
        absent, and without those all is in plain text.
    timeout_s: deadline of every picture that is given none; above 0.
    retry: how to go on while the gateway is UNAVAILABLE, or serves as many calls as it can; nothing else is retried.

    Make it inside a running event loop, and close it (`async with` does): pictures that were begun here
    and left unfinished are cancelled then. Every method raises classes of bottega.errors.
    """


class Client(CacheMethods, ControlNetMethods, LoraMethods, TemplateMethods):
    """A connection to a gateway, without asyncio; AsyncClient documents the arguments.

    Safe to share between threads. Close it (`with` does); one that is forgotten closes when it is collected.
    """

    _kind = AsyncClient
