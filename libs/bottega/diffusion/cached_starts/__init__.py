"""Pictures that start from the latents of similar prompts' pictures: what they ask, take and record (NSDI'24)."""

from bottega.diffusion.cached_starts.key import start_key
from bottega.diffusion.cached_starts.recorder import Recording
from bottega.diffusion.cached_starts.source import LatentAnswer, LatentQuestion, LatentSource

__all__ = ["LatentAnswer", "LatentQuestion", "LatentSource", "Recording", "start_key"]
