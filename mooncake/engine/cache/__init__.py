"""The paged cache: blocks and who holds them, tables for kernels, and its memory on CPUs and GPUs."""
