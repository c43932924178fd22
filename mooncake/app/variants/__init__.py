"""Pairs of variants of one base model, whose KV one can use of the other (DroidSpeak): trained, compared, profiled."""
