"""From a request to its nodes. ``ingress`` and ``core`` meet in ``api``; ``node`` is the process."""
