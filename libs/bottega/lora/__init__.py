"""LoRAs as files: the canonical form that the suite stores and sends."""
