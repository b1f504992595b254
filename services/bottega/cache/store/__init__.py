"""The store of cached latents: `LatentStore`, over one table of entries.

`lookup` and `selector` answer queries of workers. `writer` adds recordings and evicts the least useful latents, in a
thread of their own.
"""
