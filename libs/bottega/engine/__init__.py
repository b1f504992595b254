"""The engine: denoises batches of requests step by step, with the stages before and after, and its extensions."""
