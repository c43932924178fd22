"""Prompts: computed in chunks, from the longest stored prefix on, and streamed to the decode node and the pool."""
