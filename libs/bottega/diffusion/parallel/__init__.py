"""Latent parallelism: rows of one worker's group that the other worker of a pair computes, on both sides, and the
messages between them.
"""
