"""What the cache has on its disk: latents and pictures as files with digests, records of the entries in SQLite, and
profiles of models as files.
"""
