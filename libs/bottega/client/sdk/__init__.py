"""The clients for asyncio and without it, and their jobs."""
