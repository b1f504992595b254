"""The network for masked rows: which tokens are computed, how rows share layers, and what comes from recordings.

tokens               which tokens a map computes at each resolution packing              tokens of rows with different
masks in one call of a layer rows                 the rows of one forward backbone             the network in blocks,
over the modules of the plain one transformer        a transformer's blocks
    cross_attention  keys and values of prompts, kept from step to step feature_maps       convolutions and norms, in
        full (sparse/: around masks) support              which networks can be masked
"""
