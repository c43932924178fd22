"""The files of HTTPS, looked at before anything starts: a server that cannot read its key says so in one sentence."""

from __future__ import annotations

import ssl
from pathlib import Path

from mooncake.config import ConductorSection
from mooncake.errors import ConfigError


def check_tls(section: ConductorSection) -> None:
    """Raises ConfigError, naming the file, when it is missing, is no PEM, is locked, or does not fit the others."""
    if not section.ssl_certfile:
        return
    files = {"ssl_certfile": section.ssl_certfile, "ssl_keyfile": section.ssl_keyfile}
    for name, file in (files | {"ssl_ca_certs": section.ssl_ca_certs}).items():
        if file:
            _read(name, file)
    key = section.ssl_keyfile or section.ssl_certfile
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def locked() -> str:
        raise ConfigError(f"the key {key} is locked with a password, which nobody could type here")

    try:
        context.load_cert_chain(section.ssl_certfile, section.ssl_keyfile or None, locked)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {section.ssl_certfile}") from None
        what = f"no certificate and key (PEM) in {' and '.join(filter(None, files.values()))}"
        raise ConfigError(f"{what}: {error.reason or error}") from None
    if section.ssl_ca_certs:
        try:
            context.load_verify_locations(section.ssl_ca_certs)
        except ssl.SSLError as error:
            what = f"no certificates (PEM) in {section.ssl_ca_certs}"
            raise ConfigError(f"{what}: {error.reason or error}") from None


def _read(name: str, file: str) -> None:
    """The errors of OpenSSL name no file."""
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"conductor.{name}: cannot read {file}: {error.strerror}") from None
