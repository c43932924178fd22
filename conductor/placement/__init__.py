"""Where a request goes: predicted costs, the cluster as flat arrays with what is booked on it, and the policies that
choose."""
