"""HTTPS and gRPC over TLS: certificates made with openssl, real handshakes, and files that are wrong in every way."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate, openssl

from conductor.ingress.http.server import ConnectionLimits, HttpServer
from mooncake.client import Client
from mooncake.config import ConductorSection, load_config
from mooncake.errors import ConfigError, NodeUnavailable
from mooncake.tls import CA_CERTS_ENV, SERVER_NAME_ENV, Tls, check_tls, own_tls, tls_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    (folder / "both.pem").write_bytes(b"".join(file.read_bytes() for file in make_certificate(folder, "server")))
    make_certificate(folder, "other")
    ca, ca_key = make_certificate(folder, "ca", "-addext", "keyUsage=critical,keyCertSign")
    signed = ("-CA", ca, "-CAkey", ca_key, "-addext", "basicConstraints=critical,CA:FALSE")
    make_certificate(folder, "user", *signed)
    make_certificate(folder, "named", *signed, names="DNS:llm.example,DNS:other.example")
    make_certificate(folder, "wild", *signed, names="DNS:*.example")
    make_certificate(folder, "plain", *signed, names="")
    openssl("req", "-new", "-key", folder / "server.key", "-subj", "/CN=old", "-out", folder / "old.csr")
    old = ("x509", "-req", "-in", folder / "old.csr", "-signkey", folder / "server.key", "-days", -1)
    openssl(*old, "-out", folder / "old.pem")
    (folder / "old.key").write_bytes((folder / "server.key").read_bytes())
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


def served_by(files: Path, name: str, **more: object) -> dict[str, object]:
    """The settings of a conductor with this certificate."""
    return {"ssl_certfile": str(files / f"{name}.pem"), "ssl_keyfile": str(files / f"{name}.key"), **more}


def ask(front, tls: Tls | None):
    """What our blocking client gets, asked from a thread of its own."""

    def talk() -> str:
        with Client(front.grpc_address, tls=tls) as client:
            return client.generate("x", timeout_s=10).text

    return asyncio.to_thread(talk)


async def test_grpc_answers_who_trusts_the_certificate(open_front, files, monkeypatch):
    trusted = Tls(str(files / "server.pem"))
    for settings in (served_by(files, "server"), {"ssl_certfile": str(files / "both.pem")}):
        async with open_front(**settings) as front:
            assert await ask(front, trusted) == "Hello, wörld!"
    async with open_front(**served_by(files, "named")) as front:  # signed by a CA, called by an address
        assert await ask(front, Tls(str(files / "ca.pem"), server_name="llm.example")) == "Hello, wörld!"
        for name, value in Tls(str(files / "ca.pem"), server_name="other.example").environment().items():
            monkeypatch.setenv(name, value)
        assert await ask(front, None) == "Hello, wörld!"


@pytest.mark.parametrize(
    ("server", "tls", "sentence"),
    [
        ("server", None, "it hangs up: it may want TLS"),
        ("server", Tls("ca.pem"), "its certificate is not signed by anyone who is trusted here"),
        ("named", Tls("ca.pem"), "its certificate has another name"),
        ("named", Tls("ca.pem", server_name="third.example"), "its certificate has another name"),
        ("old", Tls("old.pem"), "its certificate has expired"),
        ("", Tls("ca.pem"), "it does not speak TLS"),
    ],
)
async def test_two_sides_that_do_not_fit_say_why(open_front, files, monkeypatch, server, tls, sentence):
    monkeypatch.delenv(CA_CERTS_ENV, raising=False)
    tls = tls and Tls(str(files / tls.ca_certs), server_name=tls.server_name)
    async with open_front(**(served_by(files, server) if server else {})) as front:
        with pytest.raises(NodeUnavailable, match=f"^{front.grpc_address}: {sentence}"):
            await ask(front, tls)


async def test_callers_of_grpc_show_a_certificate_where_they_must(open_front, files):
    settings = served_by(files, "server", ssl_ca_certs=str(files / "ca.pem"), ssl_cert_reqs=2)
    trusted = str(files / "server.pem")
    async with open_front(**settings) as front:
        assert await ask(front, Tls(trusted, str(files / "user.pem"), str(files / "user.key"))) == "Hello, wörld!"
        for stranger in (Tls(trusted), Tls(trusted, str(files / "other.pem"), str(files / "other.key"))):
            with pytest.raises(NodeUnavailable, match="want to see a certificate"):
                await ask(front, stranger)
    async with open_front(**settings | {"ssl_cert_reqs": 1}) as front:  # they may, and are not asked
        assert await ask(front, Tls(trusted)) == "Hello, wörld!"


@pytest.mark.parametrize(
    ("tls", "sentence"),
    [
        (Tls("none.pem"), r"ca_certs: cannot read .*none.pem: No such file"),
        (Tls("text.pem"), r"no certificates \(PEM\) in .*text.pem"),
        (Tls("ca.pem", "user.pem"), r"no certificate and key \(PEM\) in .*user.pem"),
        (Tls("ca.pem", "user.pem", "other.key"), r"the key .*other.key does not belong to the certificate .*user.pem"),
    ],
)
def test_a_caller_s_files_that_are_wrong_are_named(files, tls, sentence):
    paths = [str(files / name) if name else "" for name in (tls.ca_certs, tls.certfile, tls.keyfile)]
    with pytest.raises(ConfigError, match=sentence):
        Client(tls=Tls(*paths))


def test_a_node_trusts_its_conductor_s_certificate_under_any_name(files, monkeypatch):
    def of(*overrides: str) -> Tls | None:
        return tls_of(load_config(None, list(overrides)))

    assert of() is None
    for name, told in (("server", "127.0.0.1"), ("named", "llm.example"), ("wild", "any.example"), ("plain", "plain")):
        certificate, key = str(files / f"{name}.pem"), str(files / f"{name}.key")
        own = (f"conductor.ssl_certfile={certificate}", f"conductor.ssl_keyfile={key}")
        assert of(*own) == Tls(certificate, server_name=told)
        assert of(own[0]) == Tls(certificate)  # on another host, without the key
        assert of(*own, "node.ssl_server_name=x") == Tls(certificate, server_name="x")
        assert of(*own, "node.ssl_ca_certs=ca.pem") == Tls("ca.pem")  # who signed it: then the name counts
    assert of("node.ssl_ca_certs=ca.pem", "node.ssl_certfile=c", "node.ssl_keyfile=k") == Tls("ca.pem", "c", "k")
    with pytest.raises(ConfigError, match=r"conductor.ssl_cert_reqs = 2 needs node.ssl_certfile"):
        of(*own, "conductor.ssl_ca_certs=ca.pem", "conductor.ssl_cert_reqs=2")

    for name in (CA_CERTS_ENV, SERVER_NAME_ENV):
        monkeypatch.delenv(name, raising=False)
    assert own_tls() is None


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "sentence"),
    [
        ("none.pem", "server.key", "", r"conductor.ssl_certfile: cannot read .*none.pem: No such file"),
        ("server.pem", "none.key", "", r"conductor.ssl_keyfile: cannot read .*none.key: No such file"),
        ("server.pem", "server.key", "none.pem", r"conductor.ssl_ca_certs: cannot read .*none.pem"),
        ("server.pem", "other.key", "", r"the key .*other.key does not belong to the certificate .*server.pem"),
        ("server.pem", "locked.key", "", r"the key .*locked.key has a password"),
        ("text.pem", "server.key", "", r"no certificate and key \(PEM\) in .*text.pem"),
        ("server.pem", "text.pem", "", r"no certificate and key \(PEM\) in .*text.pem"),
        ("server.pem", "", "", r"no certificate and key \(PEM\) in .*server.pem"),
        ("old.pem", "old.key", "", r"the certificate .*old.pem has expired$"),
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
        (["node.ssl_keyfile=k"], "node.ssl_keyfile needs node.ssl_certfile"),
        (["conductor.ssl_keyfile=k"], "conductor.ssl_keyfile needs conductor.ssl_certfile"),
        (["conductor.ssl_certfile=c", "conductor.ssl_cert_reqs=2"], "conductor.ssl_cert_reqs needs conductor.ssl_ca"),
        (["conductor.ssl_certfile=c", "conductor.ssl_cert_reqs=3"], "ssl_cert_reqs must be between 0 and 2"),
    ],
)
def test_values_that_make_no_sense_together_are_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, overrides)


def run_on(loop_name, scenario):
    new_loop = asyncio.new_event_loop if loop_name == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario)


async def tell_scheme(scope, receive, send):
    """An application whose answer is how it was asked."""
    body = scope["scheme"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop"])
def test_a_handshake_takes_a_place_and_a_limited_time(files, loop_name):
    """A client without a key must not hold a connection, or any number of them, by saying nothing."""
    run_on(loop_name, silent_clients_make_room(files))


async def silent_clients_make_room(files):
    section = ConductorSection(ssl_certfile=str(files / "server.pem"), ssl_keyfile=str(files / "server.key"))
    server = HttpServer(tell_scheme, section, ConnectionLimits(head_s=1.0, max_open=3, quiet_s=30.0))
    port = await server.start("127.0.0.1", 0)
    try:
        async with trusting(files) as client:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            silent[0][1].write(b"GET / HTTP/1.1\r\n\r\n")  # no TLS: it has gone at once
            assert not b"".join([chunk async for chunk in silent[0][0]]).startswith(b"HTTP")
            silent.append(await asyncio.open_connection("127.0.0.1", port))
            for _ in range(20):
                with pytest.raises(httpx.TransportError):
                    await client.get(f"https://127.0.0.1:{port}/")
            async with asyncio.timeout(5):
                await asyncio.gather(*(reader.read() for reader, _ in silent))
            assert (await client.get(f"https://127.0.0.1:{port}/")).text == "https"
        for _, writer in silent:
            writer.close()
        waiting, writer = await asyncio.open_connection("127.0.0.1", port)
    finally:
        async with asyncio.timeout(5):
            await server.stop()
    async with asyncio.timeout(5):
        assert await waiting.read() == b""
    writer.close()


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop"])
def test_handshakes_that_say_nothing_give_way(files, loop_name):
    run_on(loop_name, silent_clients_give_way(files))


async def silent_clients_give_way(files):
    section = ConductorSection(ssl_certfile=str(files / "server.pem"), ssl_keyfile=str(files / "server.key"))
    server = HttpServer(tell_scheme, section, ConnectionLimits(max_open=4, quiet_s=0.3))
    port = await server.start("127.0.0.1", 0)
    try:
        async with trusting(files) as resting, trusting(files) as client:
            assert (await resting.get(f"https://127.0.0.1:{port}/")).text == "https"
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            await asyncio.sleep(0.4)
            assert (await client.get(f"https://127.0.0.1:{port}/")).text == "https"
            assert await asyncio.wait_for(silent[0][0].read(), 5) == b"", "the oldest handshake has ended"
            [kept] = resting._transport._pool.connections
            assert kept.is_available() and not kept.is_closed(), "and not one that has answered"
            assert (await resting.get(f"https://127.0.0.1:{port}/")).text == "https"
        for _, writer in silent:
            writer.close()
    finally:
        await server.stop()
