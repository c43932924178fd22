"""A model on a GPU: planned attention, replayed decode steps, tokens drawn there."""
