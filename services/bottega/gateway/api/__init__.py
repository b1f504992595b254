"""The gRPC services of the gateway, and what happens to a request before it is a job.

Requests are checked, completed with defaults and admitted; messages are converted to the gateway's values and back.
"""
