"""Edits in the engine: forward passes of masked rows, recorded activations, and latents kept for later edits.

A template is an image that is edited; its recording has the activations from drawing it. A row is the conditional or
the unconditional half of guidance, of one image. A turn is one forward pass of the engine's batch.
"""
