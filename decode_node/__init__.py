"""Answers: prompts are handed over into the paged cache, which others write into, and full blocks are stored."""
