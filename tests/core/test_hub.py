"""Models by name, fetched by huggingface_hub from a hub on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from hub import Hub, commit_of
from huggingface_hub import _tree_cache, constants
from tiny_gguf import write_gguf
from tiny_model import write_tiny_model

from mooncake.checkpoint import HFCheckpoint, open_checkpoint
from mooncake.errors import ModelError
from mooncake.hub import HubName, parse_hub_name

_FILE_PATH = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With the model "acme/tiny", and nothing fetched yet."""
    with Hub().serving() as hub:
        write_tiny_model(tmp_path / "tiny")
        hub.revisions["acme/tiny", "main"] = tmp_path / "tiny"
        # As with HF_ENDPOINT and without HF_HUB_OFFLINE, which huggingface_hub reads when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + _FILE_PATH)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("acme/tiny@v1.0", HubName("acme/tiny", "v1.0")),
        ("acme/tiny-GGUF:Q4_K_M", HubName("acme/tiny-GGUF", quantisation="Q4_K_M")),
        ("acme/tiny@refs/pr/1:Q8_0", HubName("acme/tiny", "refs/pr/1", "Q8_0")),
        ("tiny", None),
        ("/models/tiny", None),
        ("./tiny", None),
        ("~/tiny", None),
        ("../models/tiny", None),
        ("models/tiny/", None),
        ("models/tiny.gguf", None),
        ("a/b/c", None),
        ("acme/a--b", None),  # the hub's rules
    ],
)
def test_names_of_hubs_are_told_from_paths(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_a_model_is_fetched_once_and_has_its_name(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "tiny/pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "tiny/onnx").mkdir()
    (tmp_path / "tiny/onnx/config.json").write_text("{}")
    fetched, published = open_checkpoint("acme/tiny"), HFCheckpoint(tmp_path / "tiny", 0)
    assert fetched.name == "acme/tiny"
    assert fetched.digest == published.digest
    assert fetched.load_tokenizer().template_source == published.load_tokenizer().template_source
    assert not [path for path in hub.asked if path.endswith(("pytorch_model.bin", "onnx/config.json"))]

    hub.asked.clear()
    write_tiny_model(tmp_path / "newer", seed=1)
    hub.revisions["acme/tiny", "main"] = tmp_path / "newer"
    assert open_checkpoint("acme/tiny").digest == fetched.digest
    assert not hub.asked
    assert open_checkpoint(str(fetched.path)).name == "acme/tiny"  # as `hf download` prints it


def test_what_an_interrupted_fetch_left_out_is_fetched(hub: Hub) -> None:
    fetched = open_checkpoint("acme/tiny")
    (fetched.path / "model.safetensors").unlink()
    assert open_checkpoint("acme/tiny").digest == fetched.digest


def test_branches_and_commits_can_be_named(hub: Hub, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "newer", seed=1)
    hub.revisions["acme/tiny", "next"] = tmp_path / "newer"
    newer = open_checkpoint("acme/tiny@next")
    assert newer.digest == HFCheckpoint(tmp_path / "newer", 0).digest
    assert open_checkpoint(f"acme/tiny@{commit_of(tmp_path / 'newer')}").path == newer.path
    with pytest.raises(ModelError, match="acme/tiny has no revision v9 at http"):
        open_checkpoint("acme/tiny@v9")


def test_gguf_files_are_named_by_their_quantisation(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "BF16").mkdir(parents=True)
    write_gguf(folder / "tiny-Q8_0.gguf", pre="smollm", kind=gguf.GGMLQuantizationType.Q8_0)
    write_gguf(folder / "BF16/tiny-BF16.gguf", pre="smollm", tensors_a_file=4)
    hub.revisions["acme/tiny-GGUF", "main"] = folder
    for name in ("acme/tiny-GGUF:Q8_0", "acme/tiny-GGUF:q8_0"):
        assert open_checkpoint(name).path.name == "tiny-Q8_0.gguf"
    assert not [path for path in hub.asked if "BF16" in path]
    assert open_checkpoint("acme/tiny-GGUF:BF16").path.name.startswith("tiny-BF16-00001-of-")
    with pytest.raises(ModelError, match=r"no GGUF file of Q8; acme/tiny-GGUF:QUANTISATION names one of BF16/tiny"):
        open_checkpoint("acme/tiny-GGUF:Q8")
    with pytest.raises(ModelError, match=r"has no safetensors files; acme/tiny-GGUF:QUANTISATION names one of BF16/"):
        open_checkpoint("acme/tiny-GGUF")


def test_what_cannot_be_fetched_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"there is no model acme/tny at http.*, nor here; private ones need HF_TOKEN"):
        open_checkpoint("acme/tny")
    hub.gated.add("acme/tiny")
    with pytest.raises(ModelError, match=r"acme/tiny is gated: accept its terms at http.*/acme/tiny, and set HF_TOKEN"):
        open_checkpoint("acme/tiny")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"a pickle")
    hub.revisions["acme/pickled", "main"] = tmp_path / "pickled"
    with pytest.raises(ModelError, match="no safetensors files, only pickles, which could run any code"):
        open_checkpoint("acme/pickled")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no model at acme/other here, and http://127.* cannot be reached to fetch"):
        open_checkpoint("acme/other")


def test_a_hub_that_is_silent_is_not_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.hub.SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ModelError, match="cannot be reached to fetch it"):
            open_checkpoint("acme/tiny")


def test_a_cache_that_does_not_tell_what_it_should_have_is_used_where_no_hub_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions of huggingface_hub left them."""
    fetched = open_checkpoint("acme/tiny")
    for told in (tmp_path / "cache").rglob("trees/*.json"):
        told.unlink()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("acme/tiny").digest == fetched.digest
    (fetched.path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"acme/tiny has no safetensors files$"):
        open_checkpoint("acme/tiny")


def test_folders_come_before_names(hub: Hub, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "acme/tiny", seed=1)
    assert open_checkpoint("acme/tiny").name == "tiny"
    assert not hub.asked
