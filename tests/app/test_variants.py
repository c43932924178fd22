"""Two variants of a model compared, and the resulting profile."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from dirty_pages import dirty_kb
from tiny_model import write_tiny_model

from mooncake.app.variants.comparison import Comparison, Prompt, agreement, divergence, every_input, runs
from mooncake.app.variants.profile import ProfileOptions, load_pair, pareto, profile
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ConfigError
from mooncake.precision import resolve_precision
from mooncake.variants import Candidate, Profile, read_profile, write_profile

LAYERS, BLOCK = 6, 8
PLAIN = resolve_precision("float32")
RANDOM = torch.Generator().manual_seed(3)


def write_pair(folder: Path) -> tuple[Path, Path]:
    for name, seed in (("sender", 0), ("receiver", 1)):
        write_tiny_model(folder / name, seed=seed, num_hidden_layers=LAYERS, head_dim=16, max_position_embeddings=512)
    return folder / "sender", folder / "receiver"


def comparison(sender: Path, receiver: Path) -> Comparison:
    checkpoints = [open_checkpoint(str(path)) for path in (sender, receiver)]
    prompts = [
        Prompt(torch.randint(3, 300, (length,), generator=RANDOM).tolist(), compared)
        for length, compared in ((50, 3), (33, 1), (64, 8))
    ]
    layout = checkpoints[0].kv_layout(BLOCK, "float32", every_input(LAYERS))
    return Comparison(*load_pair(checkpoints, [PLAIN, PLAIN], 512), layout, prompts)


def test_of_one_model_nothing_is_lost(tmp_path: Path) -> None:
    sender, _ = write_pair(tmp_path)
    same = comparison(sender, sender)
    wanted = same.full()
    torch.testing.assert_close(wanted, same.sender_alone())
    assert same.inherited_tokens == 40 + 32 + 56 and wanted.shape[0] == 3 + 1 + 8
    layers: Iterable[int]
    for layers in ((), (2, 3), (0, 2, 5), range(LAYERS)):
        assert divergence(wanted, same.computed_anew(layers)) == pytest.approx(0, abs=1e-6)


def test_groups_from_one_layer_are_what_each_is_alone(tmp_path: Path) -> None:
    pair = comparison(*write_pair(tmp_path))
    wanted = pair.full()
    for first, lasts in ((0, [1, 3, 5]), (2, [2, 4])):
        for layers, got in pair.groups(first, lasts):
            assert torch.equal(got, pair.computed_anew(layers))
    assert torch.equal(wanted, pair.computed_anew(range(LAYERS)))
    assert divergence(wanted, pair.computed_anew(())) > 1e-3
    assert divergence(wanted, pair.sender_alone()) > 1e-3


def test_what_is_computed_goes_on_from_the_sender_at_each_run(tmp_path: Path) -> None:
    assert runs([5, 1, 2, 4]) == [range(1, 3), range(4, 6)]
    pair = comparison(*write_pair(tmp_path))
    apart, together = pair.computed_anew((1, 3)), pair.computed_anew((1, 2, 3))
    assert not torch.allclose(apart, together, atol=1e-3)


def test_a_pareto_list_has_no_group_that_a_smaller_one_equals() -> None:
    groups = [Candidate(0, 3, 0.2, 1), Candidate(1, 2, 0.3, 1), Candidate(2, 3, 0.5, 1), Candidate(0, 5, 0.2, 1)]
    assert pareto(groups) == (groups[1], groups[0])


def test_agreement_counts_rows() -> None:
    rows = torch.eye(4).log_softmax(-1)
    assert agreement(rows, rows.roll(1, 0)) == 0 and agreement(rows, rows) == 1


def test_a_profile_is_written_for_this_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sender, receiver = write_pair(tmp_path)
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "profile.json"
    lines = [{"prompt": "the quick brown fox jumps over the lazy dog " * 3, "answer": "and the others"}] * 2
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ProfileOptions(
        str(sender), str(receiver), file, prompts, keep=0.1, most_layers=LAYERS, stride=1, block_tokens=BLOCK
    )
    profile(options)
    found = read_profile(str(file))
    assert found.sender == open_checkpoint(str(sender)).digest
    found.check(open_checkpoint(str(receiver)).digest, LAYERS)
    assert found.sender_keeps == ((found.first,) if found.first else ())
    assert found.pareto[-1].kl == pytest.approx(0, abs=1e-6)  # all layers are among the groups
    assert "KL, nats" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="another model"):
        found.check(open_checkpoint(str(sender)).digest, LAYERS)


def test_a_profile_takes_the_place_of_another_once_it_is_whole(tmp_path: Path) -> None:
    """The limit on the size of a file stands for a disk that fills up: writing stops in the middle."""
    file = tmp_path / "profile.json"
    before = Profile("sender", "receiver", 1, 2, (1,))
    write_profile(file, before)
    assert dirty_kb(file) == 0, "it is on the disk before it has its name"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, unlimited[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write"):
            write_profile(file, Profile("another", "receiver", 3, 4, (3,)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert read_profile(str(file)) == before
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    sender, receiver = write_pair(tmp_path)
    other, prompts, file = tmp_path / "other", tmp_path / "prompts.jsonl", tmp_path / "profile.json"
    write_tiny_model(other, num_hidden_layers=3)
    prompts.write_text('{"prompt": "the quick brown fox jumps over the lazy dog"}')

    def run(**changes: object) -> None:
        options = {"sender": str(sender), "receiver": str(receiver), "out": file, "prompts": prompts} | changes
        profile(ProfileOptions(**options))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="longer than a block"):
        run()
    with pytest.raises(ConfigError, match="not variants of one model"):
        run(sender=str(other), block_tokens=2)
    prompts.write_text("not JSON")
    with pytest.raises(ConfigError, match="must have lines like"):
        run()
    prompts.write_text('{"prompt": "the quick brown fox jumps over the lazy dog"}')
    with pytest.raises(ConfigError, match="no group of up to 1"):
        run(block_tokens=2, most_layers=1, stride=1, keep=1.0)
    assert not file.exists()
