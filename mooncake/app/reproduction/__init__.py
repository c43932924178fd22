"""The paper's experiments, and our own requirements, in virtual time: ``mooncake reproduce``."""
