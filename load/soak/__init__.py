"""A suite under a constant mix for a long time, while one service after the other fails: what grows, what is lost.

`make soak MINUTES=60`; `load/README.md` says what it shows.
"""
