"""The cluster in virtual time: discrete events around the real conductor, caches and batching."""
