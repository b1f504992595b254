"""Cached latents in the engine: pictures that start from those of similar prompts. Source: Nirvana (NSDI'24)."""

from bottega.addons.cache.engine.order import start_key
from bottega.addons.cache.engine.recorder import JobRecording, LatentQuestion, LatentReply, LatentSource

__all__ = ["LatentReply", "LatentQuestion", "LatentSource", "JobRecording", "start_key"]
