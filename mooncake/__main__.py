"""The command ``mooncake``, also as ``python -m mooncake``."""

from __future__ import annotations


def main() -> None:
    try:
        from mooncake.app.cli.main import main as run  # on a busy machine it takes seconds
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
