"""LoRAs in the gateway: it resolves names, estimates each worker's loading time, and asks stores to prefetch."""
