"""Trains the miniature: VAE, text and vision towers, UNet. Imports torch; nothing that serves imports it."""
