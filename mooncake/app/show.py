"""Commands that only report: ``status``, ``adapters list``, ``config show``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from mooncake.app.config_file import toml_text
from mooncake.app.console import amount, gigabytes, out, plain_table, print_json
from mooncake.app.origins import settings
from mooncake.app.reach import reach
from mooncake.config import toml_value
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.json_form import json_form

STATE_STYLES = {"live": "green", "suspect": "yellow", "draining": "cyan"}


def show_status(address: str, as_json: bool) -> None:
    with reach(address) as client:
        status = client.status()
    if as_json:
        print_json(json_form(status))
        return
    ready = "[green]ready[/]" if status.ready else f"[yellow]waiting for {escape(', '.join(status.waiting_for))}[/]"
    out.print(f"[bold]{escape(status.model or 'no model yet')}[/]  {ready}")
    out.print()
    out.print(_node_table(status))
    out.print("[dim]used, cached and free: blocks of the KV cache, or of the store[/]")
    for line, names in _limits(status).items():
        out.print(f"[dim]{escape(', '.join(names))}: {escape(line)}[/]")
    links = [(node.info.node_id, link) for node in status.nodes for link in node.transports]
    if links:
        out.print()
        out.print(_link_table(links))
    if status.role_switches:
        out.print(
            f"\n{amount(status.role_switches, 'role switch', 'role switches')}, "
            f"the last with {status.last_switch_ms:.1f} ms of control work"
        )
    queries, prompt = max(1, status.block_queries), max(1, status.prompt_tokens)
    blended = f", {status.blended_tokens / prompt:.1%} blended" if status.blended_tokens else ""
    out.print(
        f"\n{amount(status.requests_total, 'request')}, {status.requests_running} running, "
        f"{status.requests_failed} failed\n"
        f"{amount(status.prompt_tokens, 'prompt token')}, {status.cached_tokens / prompt:.1%} reused{blended}; "
        f"{amount(status.block_queries, 'prompt block')}, {status.block_hits / queries:.1%} found in cache"
    )
    if status.index_dropped_blocks:
        out.print(
            f"[yellow]the prefix index was full[/] and lacks {amount(status.index_dropped_blocks, 'block')} that nodes "
            "stored: prompts with them are computed again. With larger blocks (block.tokens) there are fewer"
        )


def show_adapters(address: str, as_json: bool) -> None:
    """Those that were loaded while the cluster served, and what nodes say of them."""
    with reach(address) as client:
        status = client.status()
    told = [(node.info.node_id, each) for node in status.nodes for each in node.adapters]
    rows = [
        (each, {node_id: mine.error for node_id, mine in told if mine.number == each.number})
        for each in status.adapters
    ]
    if as_json:
        print_json([{"name": each.name, "path": each.path, "errors_by_node": errors} for each, errors in rows])
        return
    table = plain_table("adapter", "folder", "nodes")
    for each, errors in rows:
        having = ", ".join(node_id for node_id, error in errors.items() if not error)
        table.add_row(escape(each.name), escape(each.path), escape(having))
    out.print(table)
    for each, errors in rows:
        for node_id, error in errors.items():
            if error:
                out.print(f"[yellow]{escape(node_id)} lacks {escape(each.name)}:[/] {escape(error)}")


def _node_table(status: pb.StatusResponse) -> Table:
    has_gpus = any(node.info.device not in ("", "cpu") for node in status.nodes)  # a table of 80 columns without
    device = ["device"] if has_gpus else []
    table = plain_table("node", "role", "state", "address", *device, "running", "waiting", "used", "cached", "free")
    for node in status.nodes:
        load = node.load
        style = STATE_STYLES.get(node.state, "red")
        counts = (load.running, load.waiting, load.blocks_in_use, load.blocks_cached, load.blocks_free)
        table.add_row(
            escape(node.info.node_id),
            escape(node.info.role),
            f"[{style}]{escape(node.state)}[/]{_sickness(node)}",
            escape(node.info.control_address),
            *([escape(node.info.device)] if has_gpus else []),
            *(f"{count:,}" for count in counts),
        )
    return table


def _limits(status: pb.StatusResponse) -> dict[str, list[str]]:
    """What nodes that compute have room for, and the names of those of which it is true."""
    found: dict[str, list[str]] = {}
    for node in status.nodes:
        if (info := node.info).kv_bytes:
            why = f" ({info.kv_why})" if info.kv_why else ""
            steps = f"steps of {info.chunk_tokens:,} prompt tokens" if info.chunk_tokens else "whole prompts in a step"
            line = f"{gigabytes(info.kv_bytes)} of KV cache{why}, {steps}, {info.max_sequences:,} sequences"
            found.setdefault(line, []).append(info.node_id)
    return found


def _sickness(node: pb.NodeStatus) -> str:
    notes = []
    if node.health not in ("", "healthy"):
        notes.append(
            f"[red]{escape(node.health)}[/]" + (f" ({escape(node.health_reason)})" if node.health_reason else "")
        )
    if node.load.counters.get("ssd_in_trouble"):
        notes.append("[red]its SSD refuses writes or stands still[/]")
    return "".join(f" {note}" for note in notes)


def _link_table(links: list[tuple[str, pb.TransportStatus]]) -> Table:
    table = plain_table("KV from", "to", "over", "so far", "speed", "")
    for node_id, link in links:
        note = f"failed {link.failures}x: {link.reason}" if link.failures else ""
        cells = (node_id, link.peer, link.transport, gigabytes(link.bytes), f"{link.gb_per_s:.2f} GB/s", note)
        table.add_row(*map(escape, cells), style=None if link.current else "dim")
    return table


def show_config(path: Path | None, overrides: list[str], origin: bool, as_json: bool, as_toml: bool) -> None:
    rows = settings(path, overrides)
    if as_toml:
        sys.stdout.write(toml_text(rows))
        return
    if as_json:
        print_json([asdict(row) for row in rows] if origin else {row.name: row.value for row in rows})
        return
    table = plain_table("setting", "value", *(("from", "default") if origin else ()))
    for row in rows:
        changed = row.origin != "default"
        cells = [escape(row.name), escape(toml_value(row.value))]
        if origin:
            cells += [escape(row.origin), escape(toml_value(row.default)) if changed else ""]
        table.add_row(*cells, style="bold" if changed else None)
    out.print(table)
