"""Tenants: who calls the gateway's public port, known by API key. What is whose is a matter of jobs, see jobs."""
