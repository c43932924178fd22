"""Where a cluster's metadata is kept: in the conductor's memory alone, or in Redis as well."""
