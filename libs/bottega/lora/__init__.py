"""LoRAs as files: the canonical form that the suite stores and sends, and headers of untrusted safetensors."""
