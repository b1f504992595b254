"""Policies of the cache: eviction, the choice of a latent, and when to use the match predictor. No torch."""
