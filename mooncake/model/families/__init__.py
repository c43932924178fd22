"""What each family computes over the paged cache; ``mooncake.families`` has its shapes, in files of the same names."""
