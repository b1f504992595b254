"""What of jobs took how long, in all services."""
