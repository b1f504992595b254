"""The approximate cache: pictures that start from cached latents of similar prompts, and so skip steps."""
