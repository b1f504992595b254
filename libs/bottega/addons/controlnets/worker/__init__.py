"""ControlNets on servers, used by a worker's engine: links, sessions, residuals, and the replacement of lost servers.

`RemoteControlNets` is the engine's ControlNetProvider.
"""

from bottega.addons.controlnets.worker.provider import RemoteControlNets, StalenessPolicy
from bottega.addons.controlnets.worker.server_link import ControlLinkSettings

__all__ = ["ControlLinkSettings", "StalenessPolicy", "RemoteControlNets"]
