"""The clients, with and without asyncio, and their jobs."""
