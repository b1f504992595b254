"""How good a picture is: whether it shows what its prompt says.

`oracle` reads pictures of the miniature back (numpy, no torch); `clip` scores those of any model by a CLIP (torch).
`python -m bottega.quality --fd N` gives scores to a process that imports neither.
"""
