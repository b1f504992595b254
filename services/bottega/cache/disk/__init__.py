"""The cache's disk: files of latents and pictures, records of entries in SQLite, and profiles of models."""
