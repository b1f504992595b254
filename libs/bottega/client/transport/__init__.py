"""Calls to a gateway: the connection, retries, time-outs, a job's events, and cancelling on exit."""
