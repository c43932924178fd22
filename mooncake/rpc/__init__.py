"""gRPC between processes, and its messages."""
