"""What ``serve`` and ``http`` put servers under, and measure: load, from clients that each wait for their answers."""
