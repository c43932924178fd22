"""Where commands get their configuration from: a file, ``--set`` and flags, in rising order of precedence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from mooncake.addresses import check_address
from mooncake.api_keys import API_KEY_ENV
from mooncake.config import Config, load_config, toml_value

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The cluster's TOML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value; may be repeated.", show_default=False),
]
Address = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="gRPC address of the cluster.", show_default="from the configuration")
]
HttpAddress = Annotated[
    str,
    typer.Option(
        "--address",
        "--url",
        "--base-url",
        metavar="HOST:PORT",
        help="HTTP address of the cluster, or the URL of another server.",
        show_default="from the configuration",
    ),
]


def load(path: Path | None, overrides: list[str] | None, flags: Mapping[str, str | int | list[str] | None]) -> Config:
    """Flags win over --set, --set over the file, the file over the defaults."""
    given = [f"{name}={toml_value(value)}" for name, value in flags.items() if value is not None]
    config = load_config(path, [*(overrides or []), *given])
    if config.conductor.api_key:
        os.environ[API_KEY_ENV] = config.conductor.api_key  # clients read it there
    if config.conductor.ssl_certfile or config.node.ssl_ca_certs:
        from mooncake.tls import tls_of  # imports gRPC

        if tls := tls_of(config):
            os.environ.update(tls.environment())
    return config


def address_of(address: str, path: Path | None, overrides: list[str] | None) -> str:
    settings = load(path, overrides, {})  # also with an address: the configuration may have the API key
    return check_address(address or settings.conductor_address)


def http_url_of(address: str, path: Path | None, overrides: list[str] | None) -> str:
    """``address`` may also be a URL, of any server."""
    section = load(path, overrides, {}).conductor
    if "://" in address:
        return address
    return f"{section.http_scheme}://{check_address(address or section.http_address)}"
