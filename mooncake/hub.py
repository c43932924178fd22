"""Models by the names that they have on a hub, ``OWNER/NAME``: huggingface_hub fetches them into its cache.

Its own settings count: HF_ENDPOINT (another hub), HF_TOKEN (private models), HF_HUB_CACHE (the folder), HF_HUB_OFFLINE.
Torch-free.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from mooncake.errors import ModelError

log = logging.getLogger(__name__)

SILENCE_S = 20.0  # a hub that says nothing for so long is not waited for

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<quantisation>[\w.-]+))?")
_FILES = (".gguf", ".safetensors", ".json")

# What is read of a folder: no pickles, and no weights once more in another form.
_READ = ["*.safetensors", "*.json", "*.jinja", "tiktoken.model"]
_NOT_READ = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class HubName:
    """``OWNER/NAME`` is a model's folder, ``OWNER/NAME:Q4_K_M`` the .gguf file of that quantisation; ``@REVISION``
    after the name is a branch, a tag or a commit."""

    repository: str
    revision: str = "main"
    quantisation: str = ""

    def __str__(self) -> str:
        return self.repository + ("" if self.revision == "main" else f"@{self.revision}")


def parse_hub_name(text: str) -> HubName | None:
    """None for a text that cannot be such a name."""
    found = None if text.endswith(_FILES) or "--" in text or ".." in text else _NAME.fullmatch(text)
    return found and HubName(**{part: value for part, value in found.groupdict().items() if value})


def hub_name_of(folder: Path) -> str:
    """``OWNER/NAME`` for a folder in huggingface_hub's cache; "" for any other."""
    kind, *name = folder.parent.parent.name.split("--")
    return "/".join(name) if folder.parent.name == "snapshots" and kind == "models" else ""


def fetch(name: HubName) -> Path:
    """The model's folder, or its .gguf file (of several parts, the first).

    What was fetched once is opened as it is, without asking the hub: nodes that start later open the same weights, and
    need no hub. Raises ModelError: no such model, no access to it, or nothing that can be read.
    """
    folder = _cached(name) or _fetched(name)
    if not name.quantisation:
        if not any(folder.glob("*.safetensors")):
            raise ModelError(f"{name} has no safetensors files{_what_it_has(name)}")
        return folder
    wanted = re.compile(rf"(.*[-_.])?{re.escape(name.quantisation)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    files = sorted(path for path in folder.rglob("*.gguf") if wanted.fullmatch(path.name))
    if not files:
        raise ModelError(f"{name} has no GGUF file of {name.quantisation}{_what_it_has(name)}")
    return files[0]


def _cached(name: HubName) -> Path | None:
    """None if something is missing, or if nothing tells what there should be."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        get_cached_repo_tree(name.repository, revision=name.revision)
        return _snapshot(name, local_files_only=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def _fetched(name: HubName) -> Path:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        return _snapshot(name, local_files_only=not _is_reached(name))
    except errors.GatedRepoError:
        raise ModelError(f"{name} is gated: accept its terms at {hub}/{name.repository}, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"there is no model {name} at {hub}, nor here; private ones need HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name.repository} has no revision {name.revision} at {hub}") from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(f"there is no model at {name} here, and {hub} cannot be reached to fetch it") from None
    except Exception as error:  # also its HTTP client's and its storage's, which it does not name
        raise ModelError(f"cannot fetch {name} from {hub}: {error}") from None


def _is_reached(name: HubName) -> bool:
    """Whether the hub answers at all. Raises its errors, such as that it has no such model. ``snapshot_download`` would
    wait for ever for a hub that is silent; where it is not reached, a cache of old may still have the model."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name.repository, revision=name.revision, timeout=SILENCE_S)
    except HfHubHTTPError:
        raise
    except Exception as error:  # of its HTTP client, or that it is told to stay offline
        log.warning("%s cannot be asked for %s: %s", constants.ENDPOINT, name, error)
        return False
    return True


def _snapshot(name: HubName, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    spelled = {name.quantisation, name.quantisation.upper(), name.quantisation.lower()}
    quantised = [f"*{one}{part}.gguf" for one in sorted(spelled) for part in ("", "-?????-of-?????")]
    folder = snapshot_download(
        name.repository,
        revision=name.revision,
        allow_patterns=quantised if name.quantisation else _READ,
        ignore_patterns=None if name.quantisation else _NOT_READ,
        local_files_only=local_files_only,
    )
    return Path(folder)


def _what_it_has(name: HubName) -> str:
    """The end of a sentence about a model that cannot be read."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(name.repository, revision=name.revision)
    except CachedRepoTreeNotFoundError:  # a cache of old
        return ""
    files = [file.path for file in tree]
    if quantised := [path for path in files if path.endswith(".gguf")]:
        return f"; {name}:QUANTISATION names one of {', '.join(quantised)}"
    pickled = [path for path in files if path.endswith((".bin", ".pt", ".pth"))]
    return f", only pickles, which could run any code ({pickled[0]})" if pickled else ""
