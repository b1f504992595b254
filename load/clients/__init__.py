"""Example clients in Go, TypeScript and curl."""
