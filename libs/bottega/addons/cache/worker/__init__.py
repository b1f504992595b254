"""Cached latents of a worker's engine: looked up in the fleet's caches, and recorded there, over tensor connections."""

from bottega.addons.cache.worker.addon import LatentStores
from bottega.addons.cache.worker.store_link import CacheLinkSettings

__all__ = ["CacheLinkSettings", "LatentStores"]
