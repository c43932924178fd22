"""Requests from HTTP and gRPC to token ids, and tokens back to text: one ``pipeline``, a format for each API."""
