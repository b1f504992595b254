"""What a tenant may weigh, relative to others. Imports nothing: commands show it in their help."""

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
