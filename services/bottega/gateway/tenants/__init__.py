"""Tenants: the callers of the gateway's public port, known by API key, with their access and quotas."""
