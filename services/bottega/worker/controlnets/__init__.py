"""ControlNets on servers, as the worker's engine sees them: links, sessions, residuals, and who replaces a server.

`RemoteControlNets` is what the engine holds. Knows offers of links, and nothing of how they come.
"""

from bottega.worker.controlnets.provider import RemoteControlNets
from bottega.worker.controlnets.server_link import LinkSettings, Offers
from bottega.worker.controlnets.staleness import StalenessPolicy

__all__ = ["LinkSettings", "Offers", "StalenessPolicy", "RemoteControlNets"]
