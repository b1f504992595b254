"""Identities of callers: API keys, certificates, roles, quotas and grants."""
