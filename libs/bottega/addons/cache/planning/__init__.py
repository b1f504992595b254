"""Which latents to keep, which to start from, and whether to predict if there is one, in plain Python without torch."""
