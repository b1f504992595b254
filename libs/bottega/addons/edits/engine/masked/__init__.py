"""The network for masked rows: which tokens are computed, how rows share layers, and what is read from recordings.

`backbone` is the network in blocks, over the modules of the plain one. Its transformers compute the `tokens` that a
mask needs at each resolution, and `packing` runs the tokens of rows with different masks in one call of a layer.
`cross_attention` caches keys and values of prompts. `feature_maps` has convolutions and norms over whole maps or, with
`sparse`, around masks. `support` says which networks can be masked.
"""
