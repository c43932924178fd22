"""Pairs of variants of one base model that use each other's KV (DroidSpeak): trained, compared, profiled."""
