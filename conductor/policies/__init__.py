"""Placement policies: each one pure function ``(question, rng) -> Choice`` in a file of its own."""
