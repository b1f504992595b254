"""The approximate cache: latents from which pictures of similar prompts start, and the links that move them.

Its contents are managed by `store`, on top of `records`, `predictor` and `index`. These know no gRPC and no event loop.
Nothing here imports torch.
"""
