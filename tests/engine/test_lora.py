"""LoRA adapters against transformers with the same adapters merged into its weights: alone, mixed, and from cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greedy import greedy
from safetensors.torch import load_file, save_file
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

from mooncake import LLM, LoRARequest, SamplingParams
from mooncake.adapters import open_adapter
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import InvalidRequest, ModelError
from mooncake.kernels import choose_kernels, reference
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.llama import CausalLM
from mooncake.model.lora import load_adapter
from mooncake.model.reading.weights import load_weights

NEW = 12
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(3, 320, 40).tolist() for seed in range(3)]
FUSABLE = {"head_dim": 16}  # what the one-call decoder takes


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a model and two adapters, and what each name stands for, merged."""
    folder = tmp_path_factory.mktemp(request.param)
    base = write_tiny_model(folder, request.param, **FUSABLE)
    few = ("q_proj", "v_proj", "down_proj")
    return folder, {
        "": base,
        "all": write_adapter(folder / "all", base, rank=4, seed=1),
        "few": write_adapter(folder / "few", base, rank=3, seed=2, targets=few, rslora=True),
    }


@pytest.fixture(scope="module")
def llm(models: tuple[Path, dict[str, Any]]) -> Iterator[LLM]:
    folder, _ = models
    adapters = {name: str(folder / name) for name in ("all", "few")}
    with LLM(str(folder), kv_gb=0.01, block_tokens=8, chunk_tokens=16, adapters=adapters) as llm:
        yield llm
        llm.engine.block_pool.check()


def test_each_adapter_embeds_as_if_it_were_merged(models: tuple[Path, dict[str, Any]], llm: LLM) -> None:
    for _ in range(2):  # then from what is cached
        asked = [None if not name else LoRARequest(name) for name in models[1]]
        found = llm.embed([PROMPTS[0]] * len(asked), lora_request=asked)
        for output, merged in zip(found, models[1].values(), strict=True):
            with torch.no_grad():
                state = merged.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
            np.testing.assert_allclose(output.outputs.embedding, state / state.norm(), rtol=2e-5, atol=2e-5)


def test_each_adapter_answers_as_if_it_were_merged(models: tuple[Path, dict[str, Any]], llm: LLM) -> None:
    for name, merged in models[1].items():
        [answer] = llm.generate([PROMPTS[0]], GREEDY, adapter=name)
        assert answer.token_ids == greedy(merged, PROMPTS[0], NEW), name


def test_one_step_may_hold_several_adapters_and_none(models: tuple[Path, dict[str, Any]], llm: LLM) -> None:
    names = list(models[1])
    asked = [(prompt, name) for prompt in PROMPTS for name in names]
    answers = llm.generate([prompt for prompt, _ in asked], GREEDY, adapter=[name for _, name in asked])
    expected = {name: [greedy(models[1][name], prompt, NEW) for prompt in PROMPTS] for name in names}
    for (prompt, name), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == expected[name][PROMPTS.index(prompt)], name
    assert len({tuple(tokens[0]) for tokens in expected.values()}) == 3, "the adapters change nothing: no test"


def test_cached_blocks_serve_only_the_adapter_that_wrote_them(models: tuple[Path, dict[str, Any]], llm: LLM) -> None:
    prompt = np.random.default_rng(9).integers(3, 320, 40).tolist()
    for name, merged in models[1].items():
        expected = greedy(merged, prompt, NEW)
        [first] = llm.generate([prompt], GREEDY, adapter=name)
        assert first.cached_tokens == 0, "another adapter's KV was taken for this one's"
        [again] = llm.generate([prompt], GREEDY, adapter=name)
        assert again.cached_tokens == 39
        assert first.token_ids == again.token_ids == expected


def test_several_answers_and_beams_keep_their_adapter(models: tuple[Path, dict[str, Any]], llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, n=2)
    [completion] = llm.generate([PROMPTS[1]], sampling, adapter="all")
    expected = greedy(models[1]["all"], PROMPTS[1], NEW)
    assert [answer.token_ids for answer in completion.outputs] == [expected, expected]


def test_the_pass_in_one_call_and_the_one_product_by_product_agree(models: tuple[Path, dict[str, Any]]) -> None:
    """Also over the torch reference, with ragged rows of three kinds in one batch, some sequences beginning without."""
    checkpoint = open_checkpoint(str(models[0]))
    config, weights = checkpoint.config, load_weights(checkpoint, "float32")
    adapters = [load_adapter(open_adapter(name, str(models[0] / name)), config) for name in ("all", "few")]
    lengths, places = torch.tensor([5, 1, 7, 3]), torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    acting = places.repeat_interleave(lengths)
    acting[[0, 1, 6, 7]] = -1
    tables = torch.arange(4, dtype=torch.int32)[:, None]
    batch = ForwardBatch(
        tokens=torch.randint(3, 320, (16,), generator=torch.Generator().manual_seed(0)),
        positions=positions,
        query_starts=starts,
        context_lens=lengths.int(),
        block_tables=tables,
        slots=tables.long().flatten().repeat_interleave(lengths) * 8 + positions,
        logit_rows=starts[1:].long() - 1,
        adapters=acting,
    )
    rows = []
    for kernels, is_fused in ((choose_kernels(), True), (choose_kernels(), False), (reference, False)):
        model = CausalLM(config, weights, 64, kernels, is_fused=is_fused, adapters=adapters)
        cache = torch.zeros(4, config.num_layers, 2, config.num_kv_heads, 8, config.head_dim)
        rows.append(model.forward(batch, cache, NoHook()))
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows[1], rows[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_memory_of_an_adapter_that_goes_is_free_while_another_stays(is_fused: bool, tmp_path: Path) -> None:
    write_adapter(tmp_path / "large", write_tiny_model(tmp_path, **FUSABLE), rank=600)
    checkpoint = open_checkpoint(str(tmp_path))
    config, weights = checkpoint.config, load_weights(checkpoint, "float32")
    layers = load_adapter(open_adapter("large", str(tmp_path / "large")), config)
    places = CausalLM(config, weights, 64, choose_kernels(), is_fused=is_fused).adapter_places
    before = own_bytes()
    places.put(0, places.prepare(layers))
    one = own_bytes() - before
    for _ in range(5):
        places.put(1, places.prepare(layers))
        places.put(1, None)
    assert one > 3 << 20
    assert own_bytes() - before < 2 * one


def own_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon"))


def test_what_is_not_plain_lora_is_refused(models: tuple[Path, dict[str, Any]], llm: LLM, tmp_path: Path) -> None:
    folder = models[0]
    with pytest.raises(InvalidRequest, match="no adapter 'other'"):
        llm.generate([PROMPTS[0]], GREEDY, adapter="other")
    with pytest.raises(ModelError, match="cannot read"):
        open_adapter("gone", str(tmp_path))
    config = json.loads((folder / "all" / "adapter_config.json").read_text())
    weights = (folder / "all" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora; only plain and activated LoRA"):
        open_adapter("dora", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16}))
    assert open_adapter("a", str(tmp_path)).digest != open_adapter("b", str(folder / "all")).digest
    other = open_checkpoint(str(folder)).config
    with pytest.raises(ModelError, match="another shape"):
        load_adapter(open_adapter("a", str(folder / "all")), _narrower(other))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    write_adapter(tmp_path, models[1][""])
    for down, up in ((torch.zeros(0, other.hidden_size), torch.zeros(64, 0)), (torch.tensor(1.0), torch.tensor(1.0))):
        save_file({name.format("A"): down, name.format("B"): up}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelError, match="another shape"):
            load_adapter(open_adapter("a", str(tmp_path)), other)


@pytest.mark.parametrize(("half", "value"), [("A", float("nan")), ("B", float("-inf")), ("B", 3e38)])
def test_weights_that_are_not_finite_are_refused(half: str, value: float, tmp_path: Path) -> None:
    """Such an adapter was loaded, and each request for it failed. 3e38 is infinite once it is scaled."""
    write_adapter(tmp_path, write_tiny_model(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.model.layers.1.mlp.up_proj.lora_{half}.weight"][0, -1] = value
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"the adapter mine has NaN or infinite numbers in up_proj"):
        LLM(str(tmp_path), kv_gb=0.01, adapters={"mine": str(tmp_path)})


def test_a_folder_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "sql", write_tiny_model(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_adapter("sql", "~/sql").path == tmp_path / "sql"


def _narrower(config: Any) -> Any:
    from dataclasses import replace

    return replace(config, intermediate_size=config.intermediate_size - 16)
