"""What every service needs for RPC: start and end of the process, server, channels, statuses, fleet membership."""
