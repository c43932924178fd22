"""From config.json to ``ModelConfig``, family by family, and which weights each has. Torch-free."""
