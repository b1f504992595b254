"""Picture quality: how well a picture shows what its prompt asks for.

`oracle` parses pictures of the embedded model (numpy, no torch). `clip` scores pictures of any model with a CLIP model
(torch). `python -m bottega.quality --fd N` scores pictures for a process that imports neither.
"""
