"""Which node holds which prefix, or will once its prompts are computed."""
