"""Calls to a gateway: the connection, retries, time-outs, the stream of a job's events, and cancelling on exit."""
