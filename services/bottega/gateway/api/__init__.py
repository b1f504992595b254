"""The gRPC services of the gateway, and the checks of a request before it becomes a job.

Requests are checked, completed with defaults and admitted; messages are converted to the gateway's values and back.
"""
