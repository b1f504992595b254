"""Latent parallelism: the other worker of a pair computes some of a batch's rows. Both sides, and their messages."""
