"""A request's JSON as fields of its API's type, and what those mean that all HTTP APIs have."""
