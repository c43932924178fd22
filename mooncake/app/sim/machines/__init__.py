"""What machines do: compute prompts, decode, keep KV in memory and on an SSD. ``sim_machines`` has all of a run."""
