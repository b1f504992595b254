"""Caches within a byte budget: files in memory over disk, values that a thread loads, and orders of eviction.

TieredCache keeps files in sealed memory over the disk. LoadCache loads values for callers that lease them. LruCache and
Popularity decide which entry is evicted first.
"""
