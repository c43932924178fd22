"""A node that switches between prefill and decode."""
