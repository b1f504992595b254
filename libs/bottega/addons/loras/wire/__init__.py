"""LoRAs as files, in the canonical form in which the suite stores and sends them, and as messages."""
