"""RDMA as a transport: the caller's side (``transport``), the owner's, and what both need of verbs."""
