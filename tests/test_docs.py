"""Links of the documents are valid: files, anchors, and the settings that they name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from mooncake.app.cli.foreign_flags import OF_SGLANG, OF_VLLM
from mooncake.config import Config

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "deploy/docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "tests/bench").glob("*.md")), *GUIDES]
FOLDERS = ("proto", "mooncake", "kvstore", "conductor", "prefill_node", "decode_node", "deploy", "tests")
SOURCES = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("name", NAMES)
def test_every_source_that_is_named_exists(name: str) -> None:
    named = set(re.findall(r"(?<![\w*])\w[\w/]*\.(?:py|cpp|proto)\b", (ROOT / name).read_text())) - {"llama.cpp"}
    assert [path for path in named if not any(source.endswith(f"/{path}") for source in SOURCES)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_that_is_named_exists(name: str) -> None:
    sections = get_type_hints(Config)
    named = re.findall(rf"`({'|'.join(sections)})\.([a-z_]+)\b(?!\()", (ROOT / name).read_text())
    unknown = [f"{section}.{key}" for section, key in named if key not in get_type_hints(sections[section])]
    assert [key for key in unknown if not key.endswith((".py", ".md"))] == []


def test_the_way_of_a_request_leads_from_definition_to_definition() -> None:
    hops = re.findall(r"^[ →] (\w+)\.(\w+) +([\w/]+\.py)", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert len(hops) > 15
    for owner, method, path in hops:
        [found] = [node for node in ast.parse((ROOT / path).read_text()).body if getattr(node, "name", "") == owner]
        assert isinstance(found, ast.ClassDef)
        assert method in [getattr(node, "name", "") for node in found.body], f"{owner}.{method}"


def test_flags_of_other_servers_are_told_apart_as_the_guide_does() -> None:
    guide, counterparts = (ROOT / "deploy/docs/configuration.md").read_text(), OF_VLLM | OF_SGLANG
    table = guide.partition("| vLLM, SGLang | here |")[2].partition("\n\n")[0]
    told = {
        flag: set(re.findall(r"[a-z]+\.[a-z_]+", here))
        for flags, here in re.findall(r"^\| (.*) \| (.*) \|$", table, re.MULTILINE)
        for flag in re.findall(r"--[a-z-]+", flags)
    }
    assert {flag: set(re.findall(r"[a-z]+\.[a-z_]+", here)) for flag, here in counterparts.items()} == told
    ours = subprocess.run([sys.executable, "-m", "mooncake", "serve", "-h"], capture_output=True, text=True, check=True)
    words = ours.stdout.split()
    assert "--served-model-name" in words and not set(counterparts) & set(words)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_can_be_read_at_one_sitting(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 120
    assert page.name in (ROOT / "README.md").read_text()
