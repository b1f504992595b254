"""Handling of every call to a server: memory quotas, limits on calls, flow control of responses, errors."""
