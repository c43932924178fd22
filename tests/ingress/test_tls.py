"""HTTPS: certificates made here with openssl, real handshakes, and files that are wrong in every way."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from mooncake.config import ConductorSection, load_config
from mooncake.errors import ConfigError
from mooncake.tls import check_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_certificate(folder: Path, name: str, *more: object) -> tuple[Path, Path]:
    """Self-signed, or signed as ``more`` says; its file and its key's."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    request = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 1)
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl(*request, *subject, "-keyout", key, "-out", certificate, *more)
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    (folder / "both.pem").write_bytes(b"".join(file.read_bytes() for file in make_certificate(folder, "server")))
    make_certificate(folder, "other")
    ca, ca_key = make_certificate(folder, "ca", "-addext", "keyUsage=critical,keyCertSign")
    make_certificate(folder, "user", "-CA", ca, "-CAkey", ca_key, "-addext", "basicConstraints=critical,CA:FALSE")
    openssl("ec", "-in", folder / "server.key", "-aes128", "-passout", "pass:secret", "-out", folder / "locked.key")
    (folder / "text.pem").write_text("no certificate\n")
    return folder


def trusting(files: Path, *chain: Path) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=files / "server.pem")
    if chain:
        context.load_cert_chain(*chain)
    return httpx.AsyncClient(verify=context, trust_env=False, timeout=10)


@pytest.mark.parametrize("names", [("server.pem", "server.key"), ("both.pem", "")])
async def test_https_serves_answers_and_streams_to_who_trusts_the_certificate(open_front, files, names):
    certificate, key = (str(files / name) if name else "" for name in names)
    async with open_front(ssl_certfile=certificate, ssl_keyfile=key) as front, trusting(files) as client:
        url = f"https://127.0.0.1:{front.http_port}"
        assert (await client.get(f"{url}/health")).status_code == 200
        assert (await client.post(f"{url}/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]["content"]
        async with client.stream("POST", f"{url}/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            assert [line async for line in answer.aiter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):  # plain HTTP is no longer spoken there
            await front.http.get("/health")
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{url}/health")


async def test_a_client_must_show_a_certificate_where_that_is_asked(open_front, files):
    names = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "ca.pem"}
    section = {name: str(files / file) for name, file in names.items()}
    async with open_front(**section, ssl_cert_reqs=2) as front:
        url = f"https://127.0.0.1:{front.http_port}/health"
        async with trusting(files, files / "user.pem", files / "user.key") as known:
            assert (await known.get(url)).status_code == 200
        for chain in ((), (files / "other.pem", files / "other.key")):
            async with trusting(files, *chain) as unknown:
                with pytest.raises(httpx.HTTPError):
                    await unknown.get(url)


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "sentence"),
    [
        ("none.pem", "server.key", "", r"conductor.ssl_certfile: cannot read .*none.pem: No such file"),
        ("server.pem", "none.key", "", r"conductor.ssl_keyfile: cannot read .*none.key: No such file"),
        ("server.pem", "server.key", "none.pem", r"conductor.ssl_ca_certs: cannot read .*none.pem"),
        ("server.pem", "other.key", "", r"the key .*other.key does not belong to the certificate .*server.pem"),
        ("server.pem", "locked.key", "", r"the key .*locked.key is locked with a password"),
        ("text.pem", "server.key", "", r"no certificate and key \(PEM\) in .*text.pem"),
        ("server.pem", "text.pem", "", r"no certificate and key \(PEM\) in .*text.pem"),
        ("server.pem", "", "", r"no certificate and key \(PEM\) in .*server.pem"),
        ("server.pem", "server.key", "text.pem", r"no certificates \(PEM\) in .*text.pem"),
    ],
)
def test_files_that_are_wrong_are_named_before_anything_starts(files, certificate, key, ca, sentence):
    section = ConductorSection(
        ssl_certfile=str(files / certificate),
        ssl_keyfile=str(files / key) if key else "",
        ssl_ca_certs=str(files / ca) if ca else "",
    )
    with pytest.raises(ConfigError, match=sentence):
        check_tls(section)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["conductor.ssl_keyfile=k"], "conductor.ssl_keyfile needs conductor.ssl_certfile"),
        (["conductor.ssl_certfile=c", "conductor.ssl_cert_reqs=2"], "conductor.ssl_cert_reqs needs conductor.ssl_ca"),
        (["conductor.ssl_certfile=c", "conductor.ssl_cert_reqs=3"], "ssl_cert_reqs must be between 0 and 2"),
    ],
)
def test_values_that_make_no_sense_together_are_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, overrides)
