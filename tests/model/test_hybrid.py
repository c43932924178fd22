"""Models whose layers partly keep a state, against transformers' own models computed without a cache: in chunks, after
hits, turns and preemptions, with forks, and after steps that were abandoned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from empty_rows import num_empty_rows
from greedy import greedy
from safetensors.torch import load_file, save_file
from tiny_hybrid import (
    BLOCK,
    HYBRIDS,
    STATES,
    Failing,
    hybrid_engine,
    prompt_of,
    run,
    run_failing,
    sequence,
    write_hybrid,
)
from transformers import AutoConfig, AutoModelForImageTextToText

from mooncake import LLM
from mooncake.app.bench.peers.own import OwnEngine
from mooncake.block_size import block_size_advice
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.config import load_config
from mooncake.engine.backends.backend import BackendSpec, CacheSize, Processes, draft_on, open_backend, open_for_node
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.errors import ConfigError, ModelError
from mooncake.families.registry import read_config
from mooncake.kernels import choose_kernels, reference
from mooncake.model import load_model
from mooncake.model_config import ModelConfig, Settings
from mooncake.page_groups import block_layout, groups_of
from mooncake.precision import FLOAT32, resolve_precision
from mooncake.sampling import BeamSearch

GROUPS = {"lfm2": (5, 1), "lfm2-moe": (5, 1), "nemotron-h": (5, 4), "nemotron-3": (5, 4)}  # groups, and rows of a state
CUT = (Processes(tensor=2), Processes(stages=2), Processes(context=2))


class Model:
    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.has_five_groups = name in GROUPS
        self.theirs = write_hybrid(name, folder)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], guess: list[int], count: int = 12) -> list[int]:
        key = (count, *prompt)
        if key not in self._known:
            self._known[key] = greedy(self.theirs, prompt, count, guess)
        return self._known[key]

    def answers(
        self, prompts: dict[str, list[int]], guesses: dict[str, list[int]], count: int = 12
    ) -> dict[str, list[int]]:
        return {name: self.greedy(prompt, guesses[name], count) for name, prompt in prompts.items()}

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self.folder))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: Model(name, tmp_path_factory.mktemp("hybrid")) for name in HYBRIDS}


@pytest.fixture(scope="module")
def model(models: dict[str, Model]) -> Model:
    return models["qwen3-next"]


EITHER = ("qwen3-next", "lfm2", "granite-4", "falcon-h1", "nemotron-3")


@pytest.fixture(params=EITHER)
def either(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    """With matrices of the delta rule, convolutions alone, state spaces, both state and KV in each layer, and layers
    with neither."""
    return models[request.param]


CUTS = {"whole": 0, "inside blocks": 5, "three blocks": 24}  # the last is both: several borders, and what goes on


@pytest.mark.sweep
@pytest.mark.parametrize("kernels", [reference, None], ids=["reference", "chosen"])
@pytest.mark.parametrize(
    ("name", "chunk_tokens"),
    [
        pytest.param(name, CUTS[cut], id=f"{name}-{cut}", marks=[pytest.mark.slow] * (cut == "three blocks" and rare))
        for name, rare in ((name, name not in EITHER) for name in HYBRIDS)
        for cut in CUTS
    ],
)
def test_tokens_are_theirs_one_for_one(models: dict[str, Model], name: str, chunk_tokens: int, kernels: Any) -> None:
    model = models[name]
    prompts = {f"r{length}": prompt_of(length) for length in (1, 7, 8, 9, 40, 70)}
    engine = hybrid_engine(model.folder, chunk_tokens=chunk_tokens, kernels=kernels or choose_kernels())
    groups = engine.config.groups
    assert (groups.num_groups, max(groups.rows, default=1)) == GROUPS.get(name, (4, 3 if "qwen" in name else 4))
    for request, prompt in prompts.items():
        engine.add(sequence(request, prompt))
    found = run(engine)
    assert found == model.answers(prompts, found)
    assert len({token for tokens in found.values() for token in tokens}) > 30, "a model that repeats proves nothing"
    assert engine.block_pool.num_in_use == 0


def test_all_layers_may_be_one_group(model: Model) -> None:
    """As with block.windows = false: states of all blocks are kept."""
    engine = hybrid_engine(model.folder, has_groups=False)
    assert engine.config.groups.num_groups == 1 and engine.config.groups.num_rows == 11
    for name, length in (("a", 48), ("b", 48), ("c", 7)):
        engine.add(asked := sequence(name, prompt_of(length)))
        found = run(engine)[name]
        assert found == model.greedy(prompt_of(length), found)
        assert asked.num_cached_tokens == (40 if name == "b" else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_states_are_exact_beside_kv_of_any_type(model: Model, dtype: str) -> None:
    """A row of other bytes, so other numbers of rows; the first token depends on nothing that is rounded but KV."""
    engine = hybrid_engine(model.folder, dtype=dtype)
    assert max(engine.config.groups.rows) == {"bfloat16": 6, "int8": 9}[dtype]
    engine.add(sequence("r", prompt_of(41)))
    first = run(engine)["r"][:1]
    assert first == model.greedy(prompt_of(41), first, 1)


# What is found in the cache


@pytest.mark.sweep(1)
@pytest.mark.parametrize("length", [7, 8, 9, 16, 47, 48, 49])
def test_a_prompt_goes_on_behind_the_last_border_before_its_last_token(either: Model, length: int) -> None:
    """A state has taken the last token in already, so a prompt that is cached to its end begins a block before."""
    engine, prompt = hybrid_engine(either.folder), prompt_of(length)
    for name, cached in (("first", 0), ("again", (length - 1) // BLOCK * BLOCK)):
        asked = sequence(name, prompt)
        engine.add(asked)
        found = run(engine)[name]
        assert found == either.greedy(prompt, found)
        assert asked.num_cached_tokens == cached
    turn = [*prompt, *found, *prompt_of(5, 1)]
    asked = sequence("turn", turn)
    engine.add(asked)
    found = run(engine)["turn"]
    assert found == either.greedy(turn, found)
    assert asked.num_cached_tokens == (length + 11) // BLOCK * BLOCK


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shared", [8, 13, 24, 40])
def test_prompts_share_what_they_have_in_common(either: Model, shared: int) -> None:
    engine, head = hybrid_engine(either.folder), prompt_of(48)
    for seed, name in enumerate("abc"):
        prompt = head[:shared] + prompt_of(30, seed + 5)
        asked = sequence(name, prompt)
        engine.add(asked)
        found = run(engine)[name]
        assert found == either.greedy(prompt, found)
        assert asked.num_cached_tokens == (shared // BLOCK * BLOCK if seed else 0)


# Preemption, forks and beams


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_places", [0, 300], ids=["recomputed", "swapped"])
def test_preempted_sequences_go_on_as_they_were(either: Model, num_places: int) -> None:
    engine = hybrid_engine(
        either.folder, num_pages=62 if either.has_five_groups else 58, num_places=num_places, max_model_len=120
    )
    prompts = {f"r{i}": prompt_of(10 + 3 * i, i) for i in range(7)}
    for name, prompt in prompts.items():
        engine.add(sequence(name, prompt, 40))
    found = run(engine)
    assert found == either.answers(prompts, found, 40)
    load = engine.load()
    assert load.preemptions >= 2 and (load.swapped_blocks > 0) == (num_places > 0)
    assert engine.block_pool.num_in_use == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("length", [15, 16, 17, 20])
def test_several_answers_each_go_on_with_a_state_of_their_own(either: Model, length: int) -> None:
    together, alone = hybrid_engine(either.folder), hybrid_engine(either.folder)
    whole = sequence("r", prompt_of(length), 14, n=4, temperature=1.0, seed=5)
    together.add(whole)
    found = run(together)
    assert len({tuple(tokens) for tokens in found.values()}) > 1
    assert together.load().copied_blocks == (0 if length % BLOCK == 0 else 3 * together.config.groups.num_groups)
    for choice in range(4):
        alone.add(sequence("one", prompt_of(length), given=whole.sampling.for_answer(choice)))
        assert run(alone)["one"] == found[f"r#{choice}" if choice else "r"]
        alone.drop_cached()


@pytest.mark.parametrize("num_places", [0, 300])
def test_beams_are_the_same_under_pressure(model: Model, num_places: int) -> None:
    found = []
    for num_pages in (400, 44):
        engine = hybrid_engine(model.folder, num_pages=num_pages, num_places=num_places, max_model_len=120)
        for length in (15, 16, 20, 24, 31):
            engine.add(sequence(f"r{length}", prompt_of(length), 20, n=3, beam_search=BeamSearch()))
        found.append(run(engine))
    assert found[0] == found[1] and engine.load().preemptions


# Steps that are abandoned


@pytest.mark.sweep(1)
@pytest.mark.parametrize("chunk_tokens", [5, 24])
def test_a_step_that_is_abandoned_leaves_states_as_they_were(either: Model, chunk_tokens: int) -> None:
    """Steps are mixed: decodes within blocks, chunks that end within blocks, and such that cross borders."""
    engine, hook = hybrid_engine(either.folder, chunk_tokens=chunk_tokens), Failing(1)
    prompts = {f"r{i}": prompt_of(9 * i + 4, i) for i in range(5)}
    found = run_failing(engine, hook, prompts)
    assert hook.num_failed > 10
    assert found == either.answers(prompts, found)


# Checkpoints and layouts


def test_a_mixture_is_read_as_published_with_all_experts_in_one(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["qwen3.5-moe"]
    for file in model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(5):
        at = f"model.layers.{layer}.mlp.experts"
        parts = [[weights.pop(f"{at}.{i}.{name}_proj.weight") for i in range(6)] for name in ("gate", "up", "down")]
        weights[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*parts[:2], strict=True)])
        weights[f"{at}.down_proj"] = torch.stack(parts[2])
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    engine = hybrid_engine(tmp_path)
    engine.add(sequence("r", prompt_of(30)))
    found = run(engine)["r"]
    assert found == model.greedy(prompt_of(30), found)


def test_the_language_model_of_a_multimodal_checkpoint_opens(tmp_path: Path) -> None:
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text |= {"intermediate_size": 48, "max_position_embeddings": 256, "eos_token_id": 2} | STATES
    text["rope_parameters"] = {**STATES["rope_parameters"], "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48}
    torch.manual_seed(3)
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    ).eval()
    whole.save_pretrained(tmp_path)
    engine = hybrid_engine(tmp_path)
    engine.add(sequence("r", prompt_of(30)))
    found = run(engine)["r"]
    assert found == greedy(whole, prompt_of(30), 12, found)


def large_qwen() -> ModelConfig:
    """Qwen3-Next 80B: 36 states of 2.2 MB, and 12 layers with 2 KB of KV a token in bfloat16."""
    shape = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
    given = {**shape, "intermediate_size": 512, "vocab_size": 320, "max_position_embeddings": 262_144}
    return read_config("qwen3_5_text", Settings(given, "config.json"), None, (), {})


def test_who_chooses_small_blocks_for_large_states_is_told_the_size_to_choose(model: Model) -> None:
    config = large_qwen()
    advice = block_size_advice(config, 64, "bfloat16")
    assert "208,896 bytes of cache in blocks of 64" in advice and "24,576 with block.tokens=544" in advice
    assert not block_size_advice(config, 544, "bfloat16") and not block_size_advice(config, 512, "bfloat16")
    assert not block_size_advice(open_checkpoint("smollm2").config, 64, "bfloat16")


@pytest.mark.parametrize(
    ("block_tokens", "rows_of_state", "num_groups", "num_empty"),
    [(64, 17, 7, 90), (512, 3, 7, 6), (544, 2, 7, 0), (1024, 2, 7, 0)],
)
def test_large_blocks_waste_nothing(block_tokens: int, rows_of_state: int, num_groups: int, num_empty: int) -> None:
    config = large_qwen()
    block = block_layout(config, block_tokens, "bfloat16")
    groups = groups_of(config, config.max_model_len, block)
    assert config.recurrence is not None and config.recurrence.state_bytes == 2_195_456
    assert (max(groups.rows, default=1), groups.num_groups, num_empty_rows(groups)) == (
        rows_of_state,
        num_groups,
        num_empty,
    )
    assert groups.windows == (0, *[2] * (num_groups - 1)) and groups.has_states


def test_an_engine_of_benchmarks_takes_no_token_twice(model: Model) -> None:
    """It has a prefix cache, and all layers in one group."""
    config = EngineConfig(BLOCK, max_model_len=120, keep_events=False)
    own = OwnEngine(model.checkpoint, resolve_precision("float32"), 1, config, 0.01)
    for _ in range(2):
        own.core.add(asked := own.sequence(prompt_of(48), 12))
        while own.core.has_work:
            own.core.step()
        found = asked.tokens[48:].tolist()
        assert found == model.greedy(prompt_of(48), found)
    assert asked.num_cached_tokens == 40
    with pytest.raises(ConfigError, match="change twice"):
        Engine(own.core._model, own.cache, config)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("bamba", {"attn_layer_indices": None}, "says of no layer that it attends"),
        ("bamba", {"attn_layer_indices": [0, 1, 2, 3, 4], "mamba_n_groups": 4}, "6 value heads cannot share 4"),
        ("bamba", {"mlp_bias": True}, "asks for mlp_bias"),
        ("falcon-h1", {"projectors_bias": True}, "asks for projectors_bias"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, "must be 2 numbers"),
        ("falcon-h1", {"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, "a number other than 0"),
        ("falcon-h1", {"mamba_d_ssm": 100}, "6 heads of Mamba of 16 are not 100"),
        ("nemotron-h", {"layers_block_type": ["mlp", "mamba"]}, r"of the letters M\*-E, the first M or \*"),
        ("nemotron-h", {"hybrid_override_pattern": "M?*"}, r"of the letters M\*-E"),
        ("nemotron-h", {"layers_block_type": None, "layer_types": None}, "of which kind its layers are"),
        ("nemotron-h", {"hybrid_override_pattern": "M-M-"}, "some of 2 layers must attend"),
        ("nemotron-3", {"mlp_hidden_act": "silu"}, "an activation other than relu2"),
        ("nemotron-3", {"n_group": 3}, "8 experts cannot be chosen from"),
    ],
)
def test_what_a_family_does_not_have_is_one_sentence(
    models: dict[str, Model], name: str, change: dict[str, Any], sentence: str
) -> None:
    given = json.loads((models[name].folder / "config.json").read_text())
    with pytest.raises(ModelError, match=sentence):
        read_config(given["model_type"], Settings(given | change, "config.json"), None, (), {})


def test_where_no_head_rotates_settings_of_rotation_say_nothing(models: dict[str, Model]) -> None:
    given = json.loads((models["nemotron-h"].folder / "config.json").read_text())
    rotating = {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "unheard of"}}
    plain, told = (read_config("nemotron_h", Settings(each, ""), None, (), {}) for each in (given, given | rotating))
    assert told == plain and len(told.still_layers) == told.num_layers


def test_what_does_not_go_with_states_is_refused(either: Model) -> None:
    model = either
    with pytest.raises(ConfigError, match="takes a token back"):
        LLM(str(model.folder), speculative_tokens=2)
    size = CacheSize(model.checkpoint.kv_layout(BLOCK, "float32"), 50, 120)
    with pytest.raises(ConfigError, match="take no token back"):
        draft_on("cpu", str(model.folder), "float32", size, 320, 2, 16)
    precision = resolve_precision("float32")
    for device, processes in (("cuda", CUT[0]), *(("cpu", cut) for cut in CUT)):
        for opening in (open_backend, open_for_node):
            with pytest.raises(ModelError, match="which run in one process"):
                opening(BackendSpec(model.checkpoint, precision, size, device, processes))
    with pytest.raises(ModelError, match="blended"):
        load_model(model.checkpoint, FLOAT32, can_blend=True)
    with pytest.raises(ConfigError, match="no states"):
        load_config(None, ["pool_layout.tensor_parallel=2"]).page_groups(model.checkpoint.config)
    with pytest.raises(ConfigError, match="keep_hidden"):
        model.checkpoint.kv_layout(BLOCK, "float32", (1,))
