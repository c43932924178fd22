"""Runs placed requests: attempts on pairs of nodes, one stream of tokens, retries."""
