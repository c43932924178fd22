"""Where a cluster's metadata is kept: in the conductor's memory only, or also in Redis."""
