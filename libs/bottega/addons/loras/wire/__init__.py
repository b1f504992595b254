"""LoRAs as files, in the canonical form that the suite stores and sends."""
