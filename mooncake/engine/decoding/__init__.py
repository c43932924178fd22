"""From logits to tokens: sampling, beams, speculation."""
