"""One model over several processes: by heads and experts, by layers, or by tokens of prompts."""
