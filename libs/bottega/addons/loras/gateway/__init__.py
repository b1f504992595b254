"""LoRAs in the gateway: it resolves names, estimates each worker's loading time, and lets stores prefetch."""
