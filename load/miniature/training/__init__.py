"""Trains the miniature: VAE, towers, UNet, ControlNets, LoRAs. Imports torch; nothing that serves imports it."""
