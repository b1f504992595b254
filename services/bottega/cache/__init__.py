"""The approximate cache: latents from which images of similar prompts start, and the connections that send them.

`store` manages its contents, on top of `records`, `predictor` and `index`. These modules do not depend on gRPC or an
event loop. Nothing here imports torch.
"""
