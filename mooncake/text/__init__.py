"""Text to tokens and back: tokenizers, chat templates in a sandbox, stop strings. Torch-free."""
