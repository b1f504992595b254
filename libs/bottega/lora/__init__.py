"""LoRAs as files: the canonical form that the suite stores and sends, and headers of strangers' safetensors.

Knows no torch and no wire; what a LoRA does to a model is bottega.diffusion's matter.
"""
