"""Runs attempts on workers: the dispatcher, the client of a worker, and the small calls beside the attempts."""
