"""A real cluster that requires an API key and TLS: clients with the key are admitted, and nodes join by themselves."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from certificates import make_certificate
from live import SMALL, running_cluster, small_config

from mooncake.api_keys import API_KEY_ENV
from mooncake.app.cli.main import exit_code
from mooncake.client import Client
from mooncake.errors import NodeUnavailable, Unauthenticated
from mooncake.tls import CA_CERTS_ENV, Tls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate"),
]

KEY, OTHER = "sk-cluster-5d1f", "sk-second-77aa"


def test_a_cluster_behind_keys_and_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_ENV, raising=False)
    monkeypatch.delenv(CA_CERTS_ENV, raising=False)
    certificate, key = make_certificate(tmp_path, "server")
    tls = Tls(str(certificate))
    config = small_config(
        f'conductor.api_keys=["{KEY}", "{OTHER}"]',
        f"conductor.ssl_certfile={certificate}",
        f"conductor.ssl_keyfile={key}",
    )
    with running_cluster(config) as cluster:  # its nodes have joined, so they knew the key
        assert cluster.http_url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        for shown, is_known in ((OTHER, True), ("sk-wrong", False)):
            http = httpx.Client(verify=context, trust_env=False, timeout=60)
            with openai.OpenAI(
                base_url=f"{cluster.http_url}/v1", api_key=shown, http_client=http, max_retries=0
            ) as client:

                def ask(client: openai.OpenAI = client) -> str:
                    return client.completions.create(model="", prompt="One, two,", max_tokens=4).choices[0].text

                if is_known:
                    assert ask()
                else:
                    with pytest.raises(openai.AuthenticationError):
                        ask()
        with Client(cluster.grpc_address, KEY) as plain, pytest.raises(NodeUnavailable, match="it may want TLS"):
            plain.status()
        with Client(cluster.grpc_address, tls=tls) as stranger, pytest.raises(Unauthenticated) as refused:
            stranger.status()
        assert exit_code(refused.value) == 2
        with Client(cluster.grpc_address, KEY, tls) as known:
            assert known.generate("One, two,").text
            assert KEY not in str(known.status())
        mooncake = [str(Path(sys.executable).parent / "mooncake"), "status", "--address", cluster.grpc_address]
        trusting = os.environ | tls.environment()
        knows = ["--set", f'conductor.api_keys=["{KEY}"]']
        reads = ["--set", f"conductor.ssl_certfile={certificate}"]
        for flags, env, code in (([], trusting, 2), (knows, trusting, 0), (knows + reads, None, 0)):
            run = [*mooncake, *flags]
            command = subprocess.run(run, capture_output=True, text=True, timeout=240, check=False, env=env)
            assert command.returncode == code
            assert ("decode-0" in command.stdout) == (code == 0) == (API_KEY_ENV not in command.stderr)
        (tmp_path / "in").write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "One,"}}')
        batch = [mooncake[0], "run-batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "--url", cluster.http_url]
        told = []
        for env, code in ((None, 1), (trusting | {API_KEY_ENV: "sk-x"}, 1), (trusting | {API_KEY_ENV: KEY}, 0)):
            command = subprocess.run(batch, capture_output=True, text=True, timeout=240, check=False, env=env)
            assert command.returncode == code, command.stderr
            told.append(command.stderr)
        assert "CERTIFICATE_VERIFY_FAILED" in told[0] and CA_CERTS_ENV in told[0]
        load = [mooncake[0], "load", "--url", cluster.http_url, "--count", "1", "--prompt-tokens", "8"]
        told = []
        for env, code in ((None, 1), (trusting | {API_KEY_ENV: "sk-x"}, 2), (trusting | {API_KEY_ENV: KEY}, 0)):
            command = subprocess.run(load, capture_output=True, text=True, timeout=240, check=False, env=env)
            assert command.returncode == code, command.stderr
            told.append(command.stdout + command.stderr)
        assert "certificate" in told[0].lower() and CA_CERTS_ENV in told[0]
        assert "wants an API key, or another one; it is read from MOONCAKE_API_KEY" in told[1]
        assert told[2].startswith("1 of 1 requests") and "sk-" not in "".join(told)
        nosy = [sys.executable, "-m", "decode_node", *(f"--set={value}" for value in SMALL)]
        nosy += [f"--set=node.conductor={cluster.grpc_address}", "--set=node.id=nosy"]
        nosy += [f"--set=node.ssl_ca_certs={certificate}"]
        node = subprocess.run(nosy, capture_output=True, text=True, timeout=240, env=os.environ | {API_KEY_ENV: "sk-x"})
        assert node.returncode == 2 and "the API key is not one of this server's" in node.stderr
        assert not [text for child in cluster.children.values() for text in child.last_lines if "sk-" in text]
