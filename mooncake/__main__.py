"""``python -m mooncake``: the command ``mooncake``."""

from __future__ import annotations

from mooncake.app.cli import main

main()
