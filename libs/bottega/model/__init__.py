"""The model: its networks, samplers and VAE, and how they are loaded and run."""
