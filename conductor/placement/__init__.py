"""Where a request goes: predicted costs, the cluster as flat arrays, and the policies that choose."""
