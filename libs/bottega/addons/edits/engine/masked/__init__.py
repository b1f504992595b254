"""The network for masked rows: which tokens are computed, how rows share layers, and what comes from recordings.

`backbone` is the network in blocks, over the modules of the plain one. Its transformers compute the `tokens` that a
mask needs at each resolution, and `packing` runs the tokens of rows with different masks in one call of a layer.
`cross_attention` keeps keys and values of prompts from step to step. `feature_maps` has convolutions and norms, in
full or, with `sparse`, around masks. `support` tells which networks can be masked.
"""
