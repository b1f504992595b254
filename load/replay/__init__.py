"""Load as production's is: requests that are planned, then sent at their times whatever becomes of the ones before.

A `Mix` describes a day, `plan` makes its requests, the same ones for the same seed, and `replay` sends them: an open
loop, whose latencies count from when each request was meant to go out. `python -m load.replay` does all of it to a
running suite; benches take the parts.
"""
