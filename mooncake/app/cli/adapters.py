"""``mooncake adapters``: those of a running cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mooncake.app.cli.commands import Commands
from mooncake.app.cli.config import Address, ConfigFile, Overrides, address_of
from mooncake.app.cli.traces import AsJson

app = Commands(help="LoRA adapters that a cluster loads while it serves.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As requests name it.", show_default=False)]


@app.command("list")
def list_loaded(
    config: ConfigFile = None, overrides: Overrides = None, address: Address = "", as_json: AsJson = False
) -> None:
    """Show adapters loaded while serving, and the nodes that have each."""
    from mooncake.app.show import show_adapters

    show_adapters(address_of(address, config, overrides), as_json)


@app.command()
def load(
    name: Name,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Its PEFT folder, at the same place for every node.", show_default=False),
    ],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace a loaded one of this name.")] = False,
) -> None:
    """Have every node load an adapter. Needs conductor.max_loaded_adapters."""
    from mooncake.adapters import adapter_folder
    from mooncake.app.reach import reach

    with reach(address_of(address, config, overrides)) as client:
        client.load_adapter(name, str(adapter_folder(str(folder)).absolute()), in_place)
    typer.echo(f"{name} is loaded")


@app.command()
def unload(name: Name, config: ConfigFile = None, overrides: Overrides = None, address: Address = "") -> None:
    """Take a loaded adapter away. New requests for it are refused; it goes once those that use it have ended."""
    from mooncake.app.reach import reach

    with reach(address_of(address, config, overrides)) as client:
        client.unload_adapter(name)
    typer.echo(f"{name} is unloaded")
