"""TLS at the conductor: the files for HTTPS and gRPC, checked before anything starts, and how callers connect.

If a file cannot be used, one sentence names it. Knows nothing of the requests.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from mooncake.config import ConductorSection, Config
from mooncake.errors import ConfigError

CA_CERTS_ENV = "MOONCAKE_SSL_CA_CERTS"  # for clients: the CAs they trust; unset: no TLS
CERTFILE_ENV = "MOONCAKE_SSL_CERTFILE"
KEYFILE_ENV = "MOONCAKE_SSL_KEYFILE"
SERVER_NAME_ENV = "MOONCAKE_SSL_SERVER_NAME"
_OUT_OF_DATE = {9: "is not valid yet", 10: "has expired"}  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, …_HAS_EXPIRED


@dataclass(frozen=True, slots=True)
class Tls:
    """How a caller reaches a conductor with a certificate; all files are PEM.

    ``ca_certs`` is the CA that signed the certificate, or the certificate itself. ``certfile`` and ``keyfile`` ("": in
    ``certfile``) are presented if the conductor asks for a certificate. ``server_name`` is a name in the conductor's
    certificate, if the address is not.
    """

    ca_certs: str
    certfile: str = ""
    keyfile: str = ""
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError, naming the file, for one that cannot be used."""
        trusted = _read("ca_certs", self.ca_certs)
        _check_trusted(self.ca_certs)
        if not self.certfile:
            return grpc.ssl_channel_credentials(trusted)
        _check_chain(self.certfile, self.keyfile)
        key = _read("keyfile", self.keyfile or self.certfile)
        return grpc.ssl_channel_credentials(trusted, key, _read("certfile", self.certfile))

    def context(self) -> ssl.SSLContext:
        """For HTTPS, where the address must be a name in the certificate, whatever ``server_name`` says. Raises like
        ``credentials``."""
        _read("ca_certs", self.ca_certs)
        context = _check_trusted(self.ca_certs)
        if self.certfile:
            _check_chain(self.certfile, self.keyfile)
            context.load_cert_chain(self.certfile, self.keyfile or None)
        return context

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options of a gRPC channel."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()

    def environment(self) -> dict[str, str]:
        """Environment variables for ``own_tls`` in this process and its children."""
        values = (self.ca_certs, self.certfile, self.keyfile, self.server_name)
        return dict(zip((CA_CERTS_ENV, CERTFILE_ENV, KEYFILE_ENV, SERVER_NAME_ENV), values, strict=True))


def own_tls() -> Tls | None:
    """The settings in this process's environment for clients; None: no TLS."""
    names = (CA_CERTS_ENV, CERTFILE_ENV, KEYFILE_ENV, SERVER_NAME_ENV)
    ca_certs, *others = (os.environ.get(name, "") for name in names)
    return Tls(ca_certs, *others) if ca_certs else None


def tls_of(config: Config) -> Tls | None:
    """How the cluster's own processes reach their conductor; None if it has no certificate.

    They trust ``node.ssl_ca_certs``, or else the conductor's certificate itself; then any name in it is accepted, if
    the key needed to read it is available. Raises ConfigError if they must present a certificate and have none.
    """
    conductor, node = config.conductor, config.node
    if not (conductor.ssl_certfile or node.ssl_ca_certs):
        return None
    if conductor.ssl_cert_reqs == ssl.CERT_REQUIRED and not node.ssl_certfile:
        raise ConfigError("conductor.ssl_cert_reqs = 2 needs node.ssl_certfile: nodes must present a certificate, too")
    name = node.ssl_server_name
    if not (name or node.ssl_ca_certs):
        name = _name_in(conductor.ssl_certfile, conductor.ssl_keyfile)
    return Tls(node.ssl_ca_certs or conductor.ssl_certfile, node.ssl_certfile, node.ssl_keyfile, name)


def server_credentials(section: ConductorSection) -> grpc.ServerCredentials | None:
    """For the conductor's gRPC, where client certificates are required or not requested; they cannot be optional. None:
    no TLS. ``check_tls`` has read the files."""
    if not section.ssl_certfile:
        return None
    chain = Path(section.ssl_certfile).read_bytes()
    key = Path(section.ssl_keyfile or section.ssl_certfile).read_bytes()
    if section.ssl_cert_reqs != ssl.CERT_REQUIRED:
        return grpc.ssl_server_credentials([(key, chain)])
    signers = Path(section.ssl_ca_certs).read_bytes()
    return grpc.ssl_server_credentials([(key, chain)], signers, require_client_auth=True)


def check_tls(section: ConductorSection) -> None:
    """Raises ConfigError, naming the file, when it is missing, is not PEM, has a password, does not match the others,
    or is a certificate that has expired or begins later."""
    if not section.ssl_certfile:
        return
    files = {"ssl_certfile": section.ssl_certfile, "ssl_keyfile": section.ssl_keyfile}
    for name, file in (files | {"ssl_ca_certs": section.ssl_ca_certs}).items():
        if file:
            _read(f"conductor.{name}", file)
    _check_chain(section.ssl_certfile, section.ssl_keyfile)
    try:
        _shown_to_itself(section.ssl_certfile, section.ssl_keyfile)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_DATE:  # no caller would accept it
            what = f"the certificate {section.ssl_certfile} {_OUT_OF_DATE[error.verify_code]}"
            raise ConfigError(what) from None
    except (OSError, ValueError):  # an end could not present it to the other: callers may all the same
        pass
    if section.ssl_ca_certs:
        _check_trusted(section.ssl_ca_certs)


def _check_chain(certfile: str, keyfile: str) -> ssl.SSLContext:
    """The context of a server with this certificate."""
    key = keyfile or certfile
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def locked() -> str:
        raise ConfigError(f"the key {key} has a password, which cannot be entered here")

    try:
        context.load_cert_chain(certfile, keyfile or None, locked)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {certfile}") from None
        what = f"no certificate and key (PEM) in {' and '.join(filter(None, (certfile, keyfile)))}"
        raise ConfigError(f"{what}: {error.reason or error}") from None
    return context


def _check_trusted(ca_certs: str) -> ssl.SSLContext:
    """The context of a client that trusts these certificates, whoever signed them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(ca_certs)
    except ssl.SSLError as error:
        raise ConfigError(f"no certificates (PEM) in {ca_certs}: {error.reason or error}") from None
    return context


def _read(name: str, file: str) -> bytes:
    """Check that the file can be read, because OpenSSL's errors do not name it."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from None


def _name_in(certfile: str, keyfile: str) -> str:
    """A name in a certificate; "" if it cannot be determined."""
    try:
        return _first_name(_shown_to_itself(certfile, keyfile))
    except (ConfigError, OSError, ValueError):  # there is no key to present it with, or it has expired
        return ""


def _shown_to_itself(certfile: str, keyfile: str) -> Mapping[str, object]:
    """What a certificate says. Python only reads a peer's, so two ends of an in-memory handshake present it to each
    other. Raises ConfigError, OSError (SSLCertVerificationError if it is out of date) or ValueError."""
    context = _check_chain(certfile, keyfile)
    trusting = _check_trusted(certfile)
    trusting.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    ends = (client, context.wrap_bio(to_server, to_client, server_side=True))
    for end in ends * 3:  # hello, certificate, end
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert() or {}


def _first_name(certificate: Mapping[str, object]) -> str:
    """A host name if there is one, else an address, else the common name; a wildcard is replaced by any name."""
    alternatives = certificate.get("subjectAltName", ())
    subject = certificate.get("subject", ())
    pairs = [*alternatives] if isinstance(alternatives, tuple) else []
    pairs += [pair for names in subject for pair in names] if isinstance(subject, tuple) else []
    found = [value for kind in ("DNS", "IP Address", "commonName") for key, value in pairs if key == kind]
    return found[0].replace("*", "any", 1) if found else ""
