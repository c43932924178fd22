"""The commands: ``simulate``, ``sweep``, ``calibrate``, and ``validate`` against a live pair of nodes."""
