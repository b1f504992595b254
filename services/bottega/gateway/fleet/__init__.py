"""The fleet: the services that have joined the gateway.

The registry has the members with their leases. Other modules validate reports and limit how often services may
join.
"""
