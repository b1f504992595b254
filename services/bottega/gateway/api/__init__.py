"""The gRPC services of the gateway, and what happens to a request before it is a job: checks, defaults, admission, and
the translation between messages and the gateway's own values.
"""
