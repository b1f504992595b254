"""The services that have joined the gateway: the registry of members with their leases, the rules for what a service
may report, which service hosts what, and how often services may join.
"""
