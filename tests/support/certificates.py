"""Certificates and keys for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_certificate(folder: Path, name: str, *more: object, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Make a certificate, self-signed or signed with the options ``more``. Returns its file and its key's."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    request = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 1)
    alternatives = ("-addext", f"subjectAltName={names}") if names else ()
    openssl(*request, "-subj", f"/CN={name}", *alternatives, "-keyout", key, "-out", certificate, *more)
    return certificate, key
