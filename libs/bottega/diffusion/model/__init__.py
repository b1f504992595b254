"""The model that draws: its parts as they are loaded, the denoising network in blocks, samplers, and decoding."""
