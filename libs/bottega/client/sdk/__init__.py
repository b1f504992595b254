"""What users import: the client for asyncio, the same client without asyncio, and their jobs."""
