"""Picture quality: how well a picture shows what its prompt asks for.

`oracle` reads pictures of the miniature back (numpy, no torch). `clip` scores pictures of any model with a CLIP
(torch). `python -m bottega.quality --fd N` scores pictures for a process that imports neither.
"""
