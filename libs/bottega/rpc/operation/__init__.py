"""Operation of a service: logs, metrics, audit, and notifications to systemd."""
