"""The fleet: the services that have joined the gateway.

The registry has the members with their leases; other modules say what a service may report and how often services may
join.
"""
