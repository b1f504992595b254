"""What every service shares on the wire: server, channels, statuses, logs, metrics, fleet membership."""
