"""The worker's engine process: what it loads, the loop that speaks engine.proto over the pipe, and the translation of
its messages.
"""
