"""The accelerations by `bottega.kernels`, which only this package imports, and only when one of them is enabled.

availability   whether kernels can run for a model at all
group_norm     GroupNorm and SiLU, of the network and of the VAE's decoder
geglu          the network's feed-forward layers
lora_patch     LoRAs into the weights
masked_moves   tokens and tiles of masked rows
guided_euler   guidance and the sampler's step
candidates     all of them, in the order in which they are tried
probes         what shows the gain of those that no forward and no decoding shows
"""
