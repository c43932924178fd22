"""Which blocks are in a store's DRAM, in memory that clients on its host read without asking."""
