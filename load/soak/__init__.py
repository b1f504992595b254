"""A suite under a constant mix for a long time, while one service after the other fails: what grows, what is lost.

Run it with `make soak MINUTES=60`; see `load/README.md`.
"""
