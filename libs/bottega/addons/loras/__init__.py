"""LoRAs: low-rank changes of a model's weights, which requests name."""
