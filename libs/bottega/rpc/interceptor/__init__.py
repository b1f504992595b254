"""What every call of a server goes through: memory quotas, call limits, response flow control, errors to statuses."""
