"""Load on servers that are running: what is sent and when, over HTTP, and what their clients see."""
