"""Flags common to several commands that use argparse: each has one name, one parser and one error message.

A command makes a ``Flags``, adds common flags and its own, in the order in which ``--help`` shows them. It must not
know what flags are for, or import torch.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Collection, Sequence

from mooncake.app.outputs import output_file
from mooncake.errors import ConfigError


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults, but for those that mean that nothing is given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_absent = action.default is None or action.default is False or action.default in ("", [])
        return action.help if is_absent else super()._get_help_string(action)


class Flags:
    """The flags of ``mooncake COMMAND``; its ``--help`` begins with ``about``."""

    def __init__(self, command: str, about: str | None) -> None:
        about = (about or "").replace("``", "`")
        self._parser = argparse.ArgumentParser(
            prog=f"mooncake {command}", description=about, formatter_class=_HelpWithDefaults
        )
        self.add = self._parser.add_argument

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Exits with code 2 when argparse rejects the arguments, and with 0 after ``--help``. Raises ConfigError."""
        return self._parser.parse_args(arguments)

    def model(self, default: str = "smollm2") -> None:
        what = "an HF folder, a .gguf file, OWNER/NAME as on Hugging Face, or smollm2"
        self.add("--model", default=default, help=what if default else f"{what} (default: from the configuration)")

    def plain_dtype(self) -> None:
        self.add("--dtype", default="float32", choices=("float32", "bfloat16"), help="type of weights and KV")

    def threads(self) -> None:
        what = "threads of the compute library; 0: one per core"
        self.add("--threads", type=whole("--threads", 0), default=0, help=what)

    def overrides(self) -> None:
        add_overrides(self._parser)

    def transports(self, default: str, what: str) -> None:
        self.add("--transports", default=default, help=what)

    def vllm_python(self, what: str) -> None:
        self._interpreter("--vllm-python", what)

    def llama_python(self, what: str) -> None:
        self._interpreter("--llama-python", what)

    def peer_model(self) -> None:
        what = "the same model as an HF folder; created if not given"
        self.add("--peer-model", default="", metavar="DIR", help=what)

    def mooncake_python(self) -> None:
        what = "a Python that has mooncake-transfer-engine-non-cuda, to compare with"
        self._interpreter("--mooncake-python", what)

    def reps(self, default: int, what: str = "repetitions of each measurement") -> None:
        self.add("--reps", type=whole("--reps", 1), default=default, help=what)

    def turns_within(self) -> None:
        what = "time limit (s); each measurement is done at least once"
        self.add("--max-s", type=float, default=120.0, help=what)

    def seed(self) -> None:
        self.add("--seed", type=whole("--seed", 0), default=0, help="of everything random")

    def quick(self, what: str = "a little of everything, to see whether it works") -> None:
        self.add("--quick", action="store_true", help=what)

    def json_file(self) -> None:
        self.add("--json", type=output_file, metavar="FILE", help="also write the JSON line to this file")

    def json_line(self) -> None:
        self.add("--json", action="store_true", help="end with one line of JSON")

    def _interpreter(self, flag: str, what: str) -> None:
        """ "" is none."""
        self.add(flag, type=_program(flag), default="", metavar="PATH", help=what)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    what = "override one value; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=what)


def whole(flag: str, least: int) -> Callable[[str], int]:
    """The argparse type of an integer of at least ``least``. It raises ConfigError."""

    def read(text: str) -> int:
        value = int(text) if text.strip().isdecimal() else least - 1
        if value < least:
            raise ConfigError(f"{flag} must be a whole number from {least} on, got {text!r}")
        return value

    return read


def _program(flag: str) -> Callable[[str], str]:
    """The argparse type of a program, or "" for none. It raises ConfigError: what needs the program may come late."""

    def read(text: str) -> str:
        if text and shutil.which(text) is None:
            raise ConfigError(f"{flag}: there is no program {text!r}")
        return text

    return read


def positive(flag: str) -> Callable[[str], float]:
    """The argparse type of a positive, finite number. It raises ConfigError."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError(f"{flag} must be positive, got {text!r}")
        return value

    return read


def names(flag: str, text: str, known: Collection[str], may_be_none: bool = False) -> tuple[str, ...]:
    """The names in a comma-separated list, in its order. Raises ConfigError for an unknown name, or none at all."""
    found = tuple(filter(None, text.split(",")))
    if unknown := sorted(set(found) - set(known)):
        raise ConfigError(f"{flag} knows {', '.join(known)}, not {', '.join(unknown)}")
    if not found and not may_be_none:
        raise ConfigError(f"{flag} takes at least one of {', '.join(known)}")
    return found


def numbers(flag: str, text: str, least: int, most: int | None = None) -> tuple[int, ...]:
    """The integers in a comma-separated list. Raises ConfigError for one out of bounds, or none at all."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least or (most is not None and max(found) > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{flag} takes numbers {bounds}, got {text!r}")
    return found
