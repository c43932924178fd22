"""Reasoning and tool calls out of an answer's text, piece by piece: a file for each format of the calls."""
