"""gRPC between processes, and its messages."""

import os

# gRPC writes a line of its own to stderr for each connection that a peer ends, such as that of a process that was
# suspended. Those who call are told anyway.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
