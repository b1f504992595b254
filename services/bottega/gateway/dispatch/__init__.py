"""Dispatch of attempts to workers: the dispatcher, the connection to a worker, and the client of its calls."""
