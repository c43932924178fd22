"""The cluster in virtual time: discrete events around the conductor, caches and batching that are shipped."""
