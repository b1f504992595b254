"""ControlNets on servers, as the worker's engine sees them: links, sessions, residuals, and who replaces a server.

`RemoteControlNets` is what the engine holds.
"""

from bottega.worker.controlnets.provider import RemoteControlNets, StalenessPolicy
from bottega.worker.controlnets.server_link import ControlLinkSettings

__all__ = ["ControlLinkSettings", "StalenessPolicy", "RemoteControlNets"]
