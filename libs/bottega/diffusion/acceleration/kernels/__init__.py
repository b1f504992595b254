"""Accelerations that use `bottega.kernels`, which is imported only here, when one of them is enabled.

availability   whether kernels can run for a model group_norm     GroupNorm and SiLU of the network and of the VAE's
decoder geglu          the network's feed-forward layers lora_patch     LoRAs patched into the weights masked_moves
tokens and tiles of masked rows guided_euler   guidance and the sampler's step candidates     all of them, in the order
in which they are tried probes         probes for those that neither a forward nor a decoding shows
"""
