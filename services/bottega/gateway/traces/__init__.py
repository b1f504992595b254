"""Traces: how long each part of a job took, in all services."""
