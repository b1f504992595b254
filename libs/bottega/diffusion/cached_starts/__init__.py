"""Pictures that start from the latents of similar prompts' pictures. Source: Nirvana (NSDI'24)."""

from bottega.diffusion.cached_starts.key import start_key
from bottega.diffusion.cached_starts.recorder import JobRecording
from bottega.diffusion.cached_starts.source import LatentQuestion, LatentReply, LatentSource

__all__ = ["LatentReply", "LatentQuestion", "LatentSource", "JobRecording", "start_key"]
