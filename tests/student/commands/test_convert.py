"""A GGUF file becomes a folder with the weights, the tokenizer and the ends of the file, or is refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from opd.errors import ConfigError, OpdError, OutputError
from opd.pretrained import read_causal_lm, read_config, read_tokenizer
from student.commands.convert import convert

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("transformers.integrations.gguf", reason="the extra gguf needs a newer transformers")

WIDTH, INNER, HEADS = 32, 64, 2
PIECES = ["<unk>", "<s>", "</s>", "<turn>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
SHAPES = {
    "token_embd": (len(PIECES), WIDTH),
    "output_norm": (WIDTH,),
    "blk.0.attn_norm": (WIDTH,),
    "blk.0.ffn_norm": (WIDTH,),
    **{f"blk.0.attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")},
    "blk.0.ffn_gate": (INNER, WIDTH),
    "blk.0.ffn_up": (INNER, WIDTH),
    "blk.0.ffn_down": (WIDTH, INNER),
}


def written(
    path: Path, *, kind: str = "Q8_0", architecture: str = "llama", tokens: bool = True, **fields: bool | int
) -> dict[str, Any]:
    """Write a random model of one layer as a GGUF file; returns its tensors as they read back from there."""
    writer, draw = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(PIECES))
    if tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_scores([float(-i) for i in range(len(PIECES))])
        writer.add_token_types([2, 3, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 260))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    for name, value in fields.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(name.replace("__", "."), value)
    kept = {}
    for name, shape in SHAPES.items():
        values = draw.normal(0, 0.3, shape).astype(np.float32)
        kind_of = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        if kind_of.name in ("F32", "Q8_1"):  # the package can name the latter, but not make or read it
            writer.add_tensor(f"{name}.weight", values)
            kept[name] = values
        else:
            packed = gguf.quantize(values, kind_of)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind_of)
            kept[name] = gguf.dequantize(packed, kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A converted file whose answers end with one of two tokens, and what it held."""
    folder = tmp_path_factory.mktemp("gguf")
    held = written(folder / "tiny.gguf", tokenizer__ggml__add_bos_token=True, tokenizer__ggml__eot_token_id=3)
    found = convert(folder / "tiny.gguf", folder / "out")
    assert (found.architecture, found.license) == ("llama", "apache-2.0")
    assert found.parameters == sum(values.size for values in held.values())
    return folder / "out", held


def test_the_weights_are_those_of_the_file_bit_for_bit(chat: tuple[Path, dict[str, Any]]) -> None:
    folder, held = chat
    found = read_causal_lm(folder, config=read_config(folder), dtype="auto").state_dict()
    layer = "model.layers.0."
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        (f"{layer}self_attn.v_proj", "blk.0.attn_v"),
        (f"{layer}mlp.down_proj", "blk.0.ffn_down"),
        (f"{layer}input_layernorm", "blk.0.attn_norm"),
    ):
        assert torch.equal(found[f"{ours}.weight"], torch.from_numpy(held[theirs])), ours


def test_every_token_that_ends_an_answer_is_in_the_generation_config(chat: tuple[Path, dict[str, Any]]) -> None:
    assert GenerationConfig.from_pretrained(chat[0]).eos_token_id == [2, 3]


def test_the_tokenizer_puts_bos_before_a_text_where_the_file_says_so_and_by_default(
    chat: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_tokenizer(chat[0])("a")["input_ids"][0] == 1
    for name, fields in (("silent", {}), ("without", {"tokenizer__ggml__add_bos_token": False})):
        written(tmp_path / f"{name}.gguf", **fields)
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
    assert not caplog.records
    assert read_tokenizer(tmp_path / "silent")("a")["input_ids"][0] == 1
    assert read_tokenizer(tmp_path / "without")("a")["input_ids"][0] != 1
    assert "puts no <s> before a text" in caplog.text


def cut(share: float) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        written(file)
        whole = file.read_bytes()
        file.write_bytes(whole[: int(share * len(whole))])

    return change


def unknown_blocks(file: Path) -> None:
    """A file whose tensors are said to be of a quantisation that cannot be read."""
    written(file, kind="Q8_1")
    name = b"blk.0.ffn_down.weight"
    whole = bytearray(file.read_bytes())
    whole[(at := whole.index(name) + len(name) + 4 + 16) : at + 4] = (9).to_bytes(4, "little")
    file.write_bytes(whole)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda file: None, "is not a file"),
    "a folder": (Path.mkdir, "is not a file"),
    "text": (lambda file: file.write_text("run: a" * 99), "cannot be read: .*not a GGUF file"),
    "an empty file": (Path.touch, "cannot be read"),
    "a cut header": (cut(0.1), "cannot be read"),
    "cut tensors": (cut(0.9), "cannot be read: .*compare its size"),
    "one part": (lambda file: written(file, split__count=3), "is one part of 3; join them"),
    "an architecture": (lambda file: written(file, architecture="mamba9"), "cannot be read: .*mamba9"),
    "a quantisation": (unknown_blocks, "cannot be read: .*Q8_1.*another quantisation"),
    "an adapter": (lambda file: written(file, tokens=False), "has no tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_converted_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    make, said = REFUSED[case]
    make(tmp_path / "bad.gguf")
    with pytest.raises(ConfigError, match=said) as caught:
        convert(tmp_path / "bad.gguf", tmp_path / "out")
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value)
    assert not [*tmp_path.glob("out*")]


def test_a_disk_without_the_space_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(OutputError, match=r"0\.0 GiB free; .* --dtype bfloat16"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not [*tmp_path.glob("out*")]


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    written(tmp_path / "tiny.gguf")
    with pytest.raises(OpdError, match="exists already"):
        convert(tmp_path / "tiny.gguf", tmp_path)
