"""Edits in the engine: masked groups, their recordings, and the latents that later edits start from."""
