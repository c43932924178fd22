"""Start the nodes of a cluster as Ray actors, on a Ray that runs already or on a private one, until Ctrl-C.

    python deploy/ray_cluster.py --config cluster.toml                       # a private Ray on this machine
    python deploy/ray_cluster.py --config cluster.toml --address HOST:6390   # join one

To make a Ray of several machines, with authentication and without the dashboard, on the first and then on each other:

    (umask 077 && python -c "import secrets; print(secrets.token_hex(32), end='')" > ~/.mooncake-ray-token)  # the first
    scp FIRST:.mooncake-ray-token ~/                                                             # each other
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.mooncake-ray-token RAY_USAGE_STATS_ENABLED=0
    ray start --head --port 6390 --include-dashboard=false                                       # the first
    ray start --address FIRST:6390                                                               # each other

Whoever holds the token may run any code on those machines: keep it, and the ports, private. Then set conductor.host to
an address that the other machines reach; while it is a loopback address, all actors are placed on one machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mooncake.app.cli.main import exit_code
from mooncake.app.cluster.role_main import run_async
from mooncake.app.cluster.serve import serve_on_ray
from mooncake.config import load_config
from mooncake.errors import MooncakeError


def main() -> None:
    parser = argparse.ArgumentParser(description="Start the nodes of a cluster as Ray actors, until Ctrl-C.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the cluster's TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value; may be repeated"
    )
    parser.add_argument("--address", default="", metavar="HOST:PORT", help="of a running Ray; without, a private one")
    parser.add_argument("--log-level", default="WARNING", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.set)
        run_async(serve_on_ray(config, arguments.log_level, arguments.address))
    except MooncakeError as error:
        sys.stderr.write(f"ray_cluster: {error.message}\n")
        raise SystemExit(exit_code(error)) from None


if __name__ == "__main__":
    main()
