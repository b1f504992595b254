"""The activation store: recorded block outputs of templates, in memory and on disk, served to workers over links.

`store` holds the logic; it knows neither gRPC nor an event loop. Nothing here imports torch.
"""
