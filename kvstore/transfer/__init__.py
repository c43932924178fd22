"""One-sided reads and writes of other processes' memory (``engine``), and the owner's side of them (``server``)."""
