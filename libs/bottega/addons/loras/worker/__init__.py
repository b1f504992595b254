"""The LoRAs of a worker's engine: fetched from stores by digest over tensor connections, and cached in memory."""

from bottega.addons.loras.worker.addon import LoraCache
from bottega.addons.loras.worker.store_link import LoraLinkSettings

__all__ = ["LoraCache", "LoraLinkSettings"]
