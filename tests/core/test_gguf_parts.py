"""GGUF models in several files: any part opens all of them, and a set of files that is not one model is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import TOKENS, write_gguf

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ModelError
from mooncake.gguf.file import GGUFFile
from mooncake.gguf.parts import open_gguf

COUNT = 5


def write(folder: Path, name: str = "tiny-Q8_0", tensors_a_file: int = 4, **changes: object) -> list[Path]:
    """The parts of a model of 20 tensors, in order."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / f"{name}.gguf", pre="gpt-4o", tensors_a_file=tensors_a_file, **changes)
    return sorted(folder.glob(f"{name}-*.gguf"))


@pytest.mark.parametrize("tensors_a_file", [1, 3, 19])
def test_any_part_opens_the_whole_model(tmp_path: Path, tensors_a_file: int) -> None:
    write_gguf(tmp_path / "whole.gguf", pre="gpt-4o")
    whole = open_checkpoint(str(tmp_path / "whole.gguf"))
    parts = write(tmp_path, tensors_a_file=tensors_a_file)
    assert len(parts) == -(-20 // tensors_a_file)
    opened = [open_checkpoint(str(path)) for path in parts]
    for checkpoint in opened:
        assert (checkpoint.path, checkpoint.name) == (parts[0], "tiny")
        assert checkpoint.config == whole.config
        assert [int(i) for i in checkpoint.load_tokenizer().encode("123")] == [TOKENS.index("123")]
    assert len({checkpoint.digest for checkpoint in opened}) == 1


def test_tensors_are_read_from_the_part_that_has_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", pre="gpt-4o")
    whole, split = GGUFFile(tmp_path / "whole.gguf"), open_gguf(write(tmp_path)[2])
    assert list(split.tensors) == list(whole.tensors)
    for name, tensor in split.tensors.items():
        assert bytes(split.tensor_bytes(tensor)) == bytes(whole.tensor_bytes(whole.tensors[name]))


def test_the_first_part_may_have_metadata_only(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", small_first_shard=True)
    writer.add_block_count(7)
    writer.add_tensor("one", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert not GGUFFile(tmp_path / "a-00001-of-00002.gguf").tensors
    split = open_gguf(tmp_path / "a-00002-of-00002.gguf")
    assert split.get("llama.block_count") == 7
    assert np.frombuffer(split.tensor_bytes(split.tensors["one"]), np.float32).tolist() == list(range(8))


def test_the_digest_is_of_all_parts(tmp_path: Path) -> None:
    parts = write(tmp_path)
    digests = [open_checkpoint(str(parts[0])).digest]
    for part in parts:
        flip_last_byte(part)
        digests.append(open_checkpoint(str(parts[0])).digest)
    assert len(set(digests)) == 1 + COUNT


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_joined_file_is_one_file(tmp_path: Path) -> None:
    """`llama-gguf-split --merge` leaves the number of tensors, and sets the number of parts to 0."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 0)
    writer.add_int32("split.tensors.count", 1)
    writer.add_tensor("one", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert list(open_gguf(tmp_path / "a.gguf").tensors) == ["one"]


def test_a_folder_of_gguf_files_is_told_from_a_model(tmp_path: Path) -> None:
    parts = write(tmp_path)
    with pytest.raises(ModelError, match=r"holds GGUF files: give the one that is meant, such as .*-00001-of-00005"):
        open_checkpoint(str(tmp_path))
    assert open_checkpoint(str(parts[0])).config.num_layers == 2


# Files that are not one model. Each case changes the parts of a model, and says which file is told to be wrong, and why


def missing(parts: list[Path]) -> None:
    parts[2].unlink()


def truncated(parts: list[Path]) -> None:
    parts[3].write_bytes(parts[3].read_bytes()[:-40])


def header_cut(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:60])


def empty(parts: list[Path]) -> None:
    parts[4].write_bytes(b"")


def doubled(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])


def foreign_count(parts: list[Path]) -> None:
    shutil.copy(write(parts[0].parent / "other", tensors_a_file=7)[1], parts[1])


def foreign_tensors(parts: list[Path]) -> None:
    """Of a model in as many parts, with another number of tensors."""
    others = write(parts[0].parent / "other", rope_freqs=np.ones(4, np.float32), tensors_a_file=5)
    shutil.copy(others[1], parts[1])


def foreign_order(parts: list[Path]) -> None:
    """Of a model with as many tensors in as many parts, cut elsewhere."""
    others = write(parts[0].parent / "other")
    rewrite(others[1], number=2, source=others[2])
    shutil.copy(others[1], parts[1])


def foreign_name(parts: list[Path]) -> None:
    rewrite(parts[2], number=3, source=parts[2], rename={"blk.0.ffn_down.weight": "token_embd.weight"})


def fewer(parts: list[Path]) -> None:
    rewrite(parts[4], number=5, source=parts[4], leave_out=1)


def unsplit(parts: list[Path]) -> None:
    write_gguf(parts[1])


def rewrite(path: Path, number: int, source: Path, rename: dict[str, str] | None = None, leave_out: int = 0) -> None:
    """A part with this number, and with the tensors of ``source``, but the last ones."""
    file = GGUFFile(source)
    tensors = {name: bytes(file.tensor_bytes(info)) for name, info in file.tensors.items()}
    shapes = {name: info.shape for name, info in file.tensors.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    writer.add_uint16("split.no", number - 1)
    writer.add_uint16("split.count", COUNT)
    writer.add_int32("split.tensors.count", 20)
    for name in list(tensors)[: len(tensors) - leave_out]:
        values = np.frombuffer(tensors[name], np.float32).reshape(shapes[name])
        writer.add_tensor((rename or {}).get(name, name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BROKEN: dict[str, tuple[Callable[[list[Path]], None], int, str]] = {
    "missing": (missing, 2, "is missing: tiny-Q8_0-00001-of-00005.gguf is one of 5 parts of a model"),
    "truncated": (truncated, 3, "is truncated: "),
    "header cut": (header_cut, 1, "is truncated: its header does not end"),
    "empty": (empty, 4, "is not a GGUF file"),
    "doubled": (doubled, 2, "holds part 2, and is named as part 3 of 5"),
    "of another count": (foreign_count, 1, "is a part of a model in 3 parts, and tiny-Q8_0-00001-of-00005.gguf of one"),
    "of another model": (foreign_tensors, 1, "is a part of another model than tiny-Q8_0-00001-of-00005.gguf"),
    "cut elsewhere": (foreign_order, 2, "as tiny-Q8_0-00002-of-00005.gguf does: they are not parts of the same model"),
    "a tensor twice": (foreign_name, 2, "holds token_embd.weight, as tiny-Q8_0-00001-of-00005.gguf does"),
    "a tensor less": (fewer, 0, "says that the model has 20 tensors, and its 5 parts hold 19: one of them is a part"),
    "a whole model": (unsplit, 1, "is no part of a model, and tiny-Q8_0-00001-of-00005.gguf of one in 5"),
}


@pytest.mark.parametrize(("change", "which", "sentence"), BROKEN.values(), ids=BROKEN)
def test_parts_that_are_not_one_model_are_named(
    tmp_path: Path, change: Callable[[list[Path]], None], which: int, sentence: str
) -> None:
    parts = write(tmp_path)
    assert len(parts) == COUNT
    change(parts)
    with pytest.raises(ModelError) as error:
        open_checkpoint(str(parts[0]))
    assert str(error.value).startswith(str(parts[which])) and sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_part_under_another_name_finds_no_others(tmp_path: Path) -> None:
    parts = write(tmp_path)
    for name in ("renamed.gguf", "tiny-Q8_0-00002-of-00004.gguf"):
        shutil.copy(parts[1], tmp_path / name)
        with pytest.raises(ModelError) as error:
            open_checkpoint(str(tmp_path / name))
        assert f"{tmp_path / name} is one of 5 parts of a model, and is not named like one" in str(error.value)


def test_a_count_that_is_no_number_is_told(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", whole_keys={"split.count": "three"})
    with pytest.raises(ModelError, match=r"split\.count must be one integer"):
        open_checkpoint(str(tmp_path / "a.gguf"))
