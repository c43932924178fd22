"""What an engine computes with: ``backend`` opens it, on one processor or GPU, or over several processes."""
