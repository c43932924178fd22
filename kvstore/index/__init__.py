"""The accounts of a store's DRAM. Pure: the time is an argument, and nothing is copied here."""
