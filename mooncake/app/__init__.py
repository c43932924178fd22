"""What people start: the command line, clusters, replays, the simulator, benchmarks."""
