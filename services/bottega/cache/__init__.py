"""The approximate cache: latents of pictures, which those of similar prompts start from, and links that move them.

Its core (store.py and what is below it) knows no gRPC and no event loop; nothing here imports torch.
"""
