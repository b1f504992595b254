"""Calls to a gateway: connection, retries, time-outs, events of jobs, and cancelling jobs whose caller leaves."""
