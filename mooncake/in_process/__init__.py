"""A model with its engine in this process, without a cluster: ``mooncake.LLM`` and ``AsyncLLM``."""
