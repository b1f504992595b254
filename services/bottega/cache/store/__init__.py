"""The store of cached latents: `LatentStore`, over one table of entries.

lookup and selector answer questions. writer and insertion add recordings and evict the least useful latents, in a
thread of their own.
"""
