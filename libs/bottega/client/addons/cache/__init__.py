"""Approximate caches of a suite: calls to them, and what the doctor says of them."""
