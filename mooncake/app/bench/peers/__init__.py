"""Other engines and stores, each in an environment of its own, asked as ours are."""
