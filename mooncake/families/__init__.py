"""How each family of models is configured, and which weights it has: from config.json to ``ModelConfig``. Torch-free."""
