"""The activation store: what blocks put out for templates of edits, in memory over the disk, and links to workers.

What it keeps is in `store`, above `disk`: these know no gRPC and no event loop. Nothing here imports torch.
"""
