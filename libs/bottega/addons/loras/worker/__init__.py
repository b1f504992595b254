"""The LoRAs of a worker's engine: fetched from stores by digest over tensor connections, and cached in memory."""
