"""What goes from a store's DRAM to its SSD and back."""
