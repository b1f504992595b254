"""The engine: models, rows and groups, requests, and the loop that runs them step by step."""
