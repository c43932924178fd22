"""Recorded traces: read, scaled and generated; replayed against a cluster; and what caches would have made of them."""
