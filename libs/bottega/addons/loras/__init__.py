"""LoRAs: small changes of a model's weights, which requests name."""
