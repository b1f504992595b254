"""The network for masked rows: which tokens are computed, how rows share layers, and what is read from recordings.

`backbone` is a UNet in blocks, over the modules of the plain one, and `joint` a transformer with joint blocks of image
and text. Their blocks compute the `tokens` that a mask needs at each resolution, and run the tokens of rows with
different masks in one call of a layer. `self_attention` is what all their blocks begin with. `transformer` has the
blocks of UNets, and caches keys and values of prompts. `feature_maps` has convolutions and norms over whole maps or,
with `sparse`, around masks. `checks` says which networks can be masked.
"""
