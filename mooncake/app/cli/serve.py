"""``mooncake serve``: its flags, and which value of the configuration each of them sets."""

from __future__ import annotations

from typing import Annotated

import typer

from mooncake.app.cli.config import ConfigFile, Overrides, load
from mooncake.errors import ConfigError

KINDS_OF_MODEL = "A folder, a .gguf file, OWNER/NAME as on Hugging Face, or smollm2"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

NamedModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)]
Model = Annotated[str | None, typer.Option(help=f"{KINDS_OF_MODEL}.", show_default="from the configuration")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, or auto, the faster one here.", show_default="float32")
]
Prefill = Annotated[int | None, typer.Option(min=1, help="Prefill nodes.", show_default="1")]
Decode = Annotated[int | None, typer.Option(min=1, help="Decode nodes.", show_default="1")]
ServedModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its name for clients.", show_default="the model's own")
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens of prompt plus answer.", show_default="the model's own")
]
GenerationConfig = Annotated[
    str | None,
    typer.Option(metavar="auto|none", help="Sampling defaults: the model's own, or none.", show_default="auto"),
]
OverrideGenerationConfig = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Sampling defaults that count before the model's own.", show_default=False),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="FILE|TEXT", help="A chat template of your own, in Jinja.", show_default="the model's own"),
]
DefaultChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='Variables of the chat template, such as {"enable_thinking": false}.',
        show_default=False,
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="How thoughts are separated from answers; vLLM's names.", show_default="auto"),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="How tool calls are parsed; vLLM's names.", show_default="auto"),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
HttpPort = Annotated[
    int | None, typer.Option("--http-port", "--port", help="OpenAI HTTP; 0: any.", show_default="8000")
]
GrpcPort = Annotated[int | None, typer.Option(help="gRPC; 0: any.", show_default="50051")]
Lora = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=FOLDER", help="A PEFT LoRA adapter; may be repeated.", show_default=False),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="A key that callers send; may be repeated. MOONCAKE_API_KEY and conductor.api_keys keep it out of ps.",
        show_default=False,
    ),
]
AllowedOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Origin of web pages that may call (CORS), or *; may be repeated.",
        show_default=False,
    ),
]
SslCertfile = Annotated[str | None, typer.Option(metavar="FILE", help="Certificate for HTTPS and gRPC over TLS.")]
SslKeyfile = Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")]
SslCaCerts = Annotated[str | None, typer.Option(metavar="FILE", help="The CA of client certificates.")]
SslCertReqs = Annotated[
    int | None, typer.Option(min=0, max=2, help="Client certificates: 0 none, 1 optional, 2 required.")
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(metavar="URL", help="An OpenTelemetry collector (OTLP over gRPC) for traces.", show_default="none"),
]
Restart = Annotated[bool, typer.Option(help="Restart processes that died.")]
Ray = Annotated[bool, typer.Option("--ray", help="Start the nodes as Ray actors.")]
LogLevel = Annotated[str, typer.Option(help="Log level of the nodes: DEBUG, INFO, WARNING or ERROR.")]


def serve(
    named_model: NamedModel = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    dtype: Dtype = None,
    prefill: Prefill = None,
    decode: Decode = None,
    served_model_name: ServedModelName = None,
    max_model_len: MaxModelLen = None,
    generation_config: GenerationConfig = None,
    override_generation_config: OverrideGenerationConfig = None,
    chat_template: ChatTemplate = None,
    default_chat_template_kwargs: DefaultChatTemplateKwargs = None,
    reasoning_parser: ReasoningParser = None,
    tool_call_parser: ToolCallParser = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    lora: Lora = None,
    api_key: ApiKey = None,
    allowed_origin: AllowedOrigin = None,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    ssl_ca_certs: SslCaCerts = None,
    ssl_cert_reqs: SslCertReqs = None,
    otlp_traces_endpoint: OtlpTracesEndpoint = None,
    restart: Restart = True,
    ray: Ray = False,
    log_level: LogLevel = "WARNING",
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C. `mooncake config show --toml` explains what
    --set can set."""
    if named_model and model and named_model != model:
        raise ConfigError(f"got two models, {named_model} and {model}: a cluster serves one")
    flags = {
        "model.path": named_model or model,
        "model.dtype": dtype,
        "model.name": served_model_name,
        "model.max_model_len": max_model_len,
        "model.generation_config": generation_config,
        "model.generation_overrides": override_generation_config,
        "model.chat_template": chat_template,
        "model.chat_template_kwargs": default_chat_template_kwargs,
        "conductor.reasoning_parser": reasoning_parser,
        "conductor.tool_call_parser": tool_call_parser,
        "conductor.host": host,
        "conductor.allowed_origins": allowed_origin,
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "conductor.http_port": http_port,
        "conductor.grpc_port": grpc_port,
        "model.adapters": lora,
        "conductor.api_keys": api_key,
        "conductor.ssl_certfile": ssl_certfile,
        "conductor.ssl_keyfile": ssl_keyfile,
        "conductor.ssl_ca_certs": ssl_ca_certs,
        "conductor.ssl_cert_reqs": ssl_cert_reqs,
        "conductor.otlp_traces_endpoint": otlp_traces_endpoint,
    }
    settings = load(config, overrides, flags)
    log_level = log_level.upper()
    if log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {log_level!r}")
    from mooncake.app.cluster.role_main import run_async
    from mooncake.app.cluster.serve import serve as serve_here
    from mooncake.app.cluster.serve import serve_on_ray

    run_async(serve_on_ray(settings, log_level) if ray else serve_here(settings, restart, log_level))
