"""Handling of every call of a server: memory quotas, limits of calls, flow control of responses, errors."""
