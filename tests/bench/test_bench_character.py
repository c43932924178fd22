"""The benchmark of windows and shared KV trains, serves and reports. Results after two training steps mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mooncake.app.bench import character
from mooncake.app.bench.character_twins import (
    QUESTION_TOKENS,
    QUESTIONS,
    Corpus,
    Shape,
    Training,
    TwinModel,
    train,
    twins,
    write,
)
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.model import ForwardBatch, NoHook, load_model
from mooncake.precision import FLOAT32

SMALL = ["--layers", "6", "--hidden", "64", "--window", "4", "--length", "64", "--steps", "2", "--batch", "2"]
SMALL += ["--windows", "2", "--needles", "2", "--prompt-tokens", "40", "--prompt-hidden", "64", "--reps", "1"]
SHAPE = Shape(layers=12, hidden=64, heads=2, intermediate=96, window=4, length=64)
CORPUS = Corpus.of("No needle is in this haystack of plain words, however long one looks for it. " * 20)


@pytest.mark.slow
def test_it_trains_once_and_tells_losses_needles_and_bytes(tmp_path: Path) -> None:
    line, models = tmp_path / "line.json", tmp_path / "models"
    arguments = [*SMALL, "--models", str(models), "--json", str(line)]
    threads = torch.get_num_threads()
    try:
        character.main(arguments)
        made = {file: file.stat().st_mtime_ns for file in models.rglob("model.safetensors")}
        character.main(arguments)
    finally:
        torch.set_num_threads(threads)

    assert len(made) == 5 and made == {file: file.stat().st_mtime_ns for file in made}, "it trained again"
    report = json.loads(line.read_text())
    ratios = report["ratios"]
    assert [ratios[f"kv_bytes_{name}_vs_full"] for name in ("sharing", "hybrid", "local")] == [0.5, 1, 1]
    assert ratios["kv_bytes_character_vs_full"] == pytest.approx(4 / 6, abs=1e-3), "of 6 layers one is global, alone"
    assert ratios["prefill_speedup_half"] > 0 and ratios["loss_local_vs_full"] > 0
    assert len([row for row in report["results"] if row["name"] == "needles found"]) == 5
    assert str(tmp_path) not in json.dumps(report), "a path of this machine is in the line"
    with pytest.raises(ConfigError, match="was trained with other options"):
        character.main([*arguments, "--steps", "3"])


@pytest.mark.parametrize("name", twins(SHAPE))
def test_the_engine_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    twin = twins(SHAPE)[name]
    weights = train(SHAPE, twin, CORPUS, Training(2, 2, 1e-2, 0, "float32"), lambda step, loss: None)
    write(tmp_path, SHAPE, twin, weights)
    trained = TwinModel(SHAPE, twin, int(CORPUS.markers.max()) + 1)
    trained.load_state_dict(weights)
    ids = torch.from_numpy(CORPUS.validation[:60])
    checkpoint = open_checkpoint(str(tmp_path))
    cache = KVCache(checkpoint.kv_layout(16, "float32"), 4)
    batch = ForwardBatch.of_prompt(ids, 16, torch.arange(60))
    got = load_model(checkpoint, FLOAT32).forward(batch, cache.tensor, NoHook())
    torch.testing.assert_close(got, trained(ids[None])[0].detach(), atol=1e-4, rtol=1e-4)
    assert checkpoint.load_tokenizer().decode(CORPUS.training[:9].tolist()) == "No needle"


def test_character_shares_with_neighbours_and_the_last_global_layer() -> None:
    windows, sources = twins(SHAPE)["character"].windows, twins(SHAPE)["character"].sources
    assert sources == (0, 0, 2, 2, 4, 5, 4, 7, 7, 9, 9, 5)
    assert [layer for layer, window in enumerate(windows) if not window] == [5, 11]


def test_a_batch_is_text_with_a_needle_that_is_asked_for() -> None:
    (short, _), (ids, weights) = CORPUS.batches(SHAPE, Training(2, 3, 1e-3, 1, "float32"))
    assert (
        short.shape == (12, SHAPE.short) and ids.shape == (3, SHAPE.length) and weights.shape == (3, ids.shape[1] - 1)
    )
    for row, heavy in zip(ids.numpy(), weights.numpy() > 1, strict=True):
        slots = [np.flatnonzero(np.isin(row, letters)) for letters in CORPUS.letters]
        assert slots[1][0] == slots[0][0] + 1 and slots[0][-1] == SHAPE.length - QUESTION_TOKENS + 1
        assert all(len(places) == 1 + QUESTIONS and len(set(row[places])) == 1 for places in slots)
        answers = np.sort(np.concatenate([places[1:] for places in slots]))
        assert (np.flatnonzero(heavy) + 1).tolist() == answers.tolist(), "answers, and no letter of the needle itself"
        assert (row[answers - 1] == np.tile(CORPUS.markers, QUESTIONS)).all()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--window", "16"], "leaves no place for a needle"),
        (["--hidden", "65"], "--hidden must be a multiple of 32"),
        (["--steps", "0"], "--steps must be a whole number from 1 on"),
    ],
)
def test_what_it_cannot_measure_it_refuses(wrong: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        character.main([*SMALL, "--models", str(tmp_path), *wrong])
