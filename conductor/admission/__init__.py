"""Whether a request may enter now, later or not at all, and in what order those who wait do."""
