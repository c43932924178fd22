"""A model from a GGUF file: its configuration, where each of its weights is and in what form, its tokenizer."""
