"""The approximate cache: latents of pictures, which those of similar prompts start from, and links that move them.

What it keeps is in `store`, above `disk`, `predictor` and `index`: these know no gRPC and no event loop. Nothing here
imports torch.
"""
