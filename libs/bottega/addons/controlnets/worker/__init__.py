"""ControlNets on servers, for a worker's engine: connections, sessions, residuals, and moving off lost servers.

`RemoteControlNets` is the engine's ControlNetProvider.
"""

from bottega.addons.controlnets.worker.provider import RemoteControlNets, StalenessPolicy
from bottega.addons.controlnets.worker.server_link import ControlLinkSettings

__all__ = ["ControlLinkSettings", "StalenessPolicy", "RemoteControlNets"]
