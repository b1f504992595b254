"""Decides which blocks of an edit load recorded outputs and which compute all tokens. Plain Python, no torch."""
