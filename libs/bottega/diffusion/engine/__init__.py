"""The engine: its loop of turns, what a job waits for before its steps, groups of requests, one denoising step of a
group, and what is encoded before and told afterwards.
"""
