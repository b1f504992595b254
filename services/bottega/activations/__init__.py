"""The activation store: recorded activations (block outputs) of edited images, in memory and on disk, for workers.

A template is an image whose activations were recorded by edits. A section is one forward pass of a template. `store`
holds the logic and depends on neither gRPC nor an event loop. Nothing here imports torch.
"""
