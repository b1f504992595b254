"""Policies of the cache: eviction, the choice of a latent, and the use of a match predictor. Plain Python, no torch."""
