"""What the cache does with latents: questions are answered (lookup, selector), recordings taken in and the least useful
latents evicted in a thread of its own (writer, insertion), over one table of the entries; `LatentStore` is all of it.
"""
