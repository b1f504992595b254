"""The gateway: takes orders, keeps their jobs, knows the fleet, and brings the two together."""
