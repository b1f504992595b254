"""The store of cached latents: `LatentStore` and its parts.

`lookup` and `selector` answer questions of workers. `writer` adds recordings and evicts the least useful latents, in a
separate thread.
"""
