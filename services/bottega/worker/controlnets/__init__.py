"""ControlNets on servers, as the worker's engine sees them: links, sessions, residuals, and who replaces a server.

`RemoteControlNets` is what the engine holds.
"""

from bottega.worker.controlnets.provider import RemoteControlNets
from bottega.worker.controlnets.server_link import ControlLinkSettings
from bottega.worker.controlnets.staleness import StalenessPolicy

__all__ = ["ControlLinkSettings", "StalenessPolicy", "RemoteControlNets"]
