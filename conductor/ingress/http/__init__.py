"""HTTP itself: connections, bodies, limits, errors and event streams. It knows none of the APIs."""
