"""Pictures that start from cached latents of similar prompts."""
