"""The SSD under a store's DRAM: a log of segments, its index, and the threads that read and write it."""
