"""Training of the miniature: VAE, towers, UNet, ControlNets, LoRAs. Nothing that serves imports it."""
