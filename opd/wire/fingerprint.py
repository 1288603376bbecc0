"""Content hashes of a tokenizer, a chat template, a model's weights and an output head.

Equal hashes mean equal contents: a student refuses a teacher whose tokenizer has another hash, and a replica with other
weights is not re-admitted to its pool. All hashes are SHA-256 in hex. torch is imported only where tensors are hashed.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from opd.adapters import adapter_settings
from opd.errors import ConfigError
from opd.wire.types import Head

_BYTE_FALLBACK = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the map from token id to the bytes of its text, added tokens included.

    Byte-level pieces are mapped back to bytes, SentencePiece's "▁" to a space and its `<0xAB>` pieces to bytes, so that
    the hash depends on the text and not on how a library spells it. Special tokens are marked as such, because typing
    the text of an end-of-turn token does not produce that token.

    Args:
        tokenizer: a `transformers` tokenizer or a `tokenizers.Tokenizer`.
    """
    special = special_ids(tokenizer)
    digest = hashlib.sha256(b"opd-tokenizer-1")
    for token_id, data in _pieces(tokenizer):
        # Hashed with the length, so that no two vocabularies give the same byte stream.
        digest.update(struct.pack("<IBI", token_id, token_id in special, len(data)))
        digest.update(data)
    return digest.hexdigest()


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of each id's text, by id, spelled as for `tokenizer_fingerprint`; empty for ids without a token."""
    pieces = dict(_pieces(tokenizer))
    return [pieces.get(token_id, b"") for token_id in range(max(pieces, default=-1) + 1)]


def differing_token(own: Sequence[bytes], others: Sequence[bytes], start: int = 0) -> tuple[int, str, str] | None:
    """The first id of `own` to which `others` give another text, and both texts as shown to people; None if none.

    Ids without a token in `own`, and ids beyond its last one, are not compared.

    Args:
        own: bytes by id, as from `token_bytes`.
        others: bytes by id, likewise.
        start: the id of the first bytes in both.
    """
    for token, (mine, theirs) in enumerate(zip(own, chain(others, repeat(b"")), strict=False), start):
        if mine and mine != theirs:
            return token, _shown(mine), _shown(theirs)
    return None


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="backslashreplace")) if token else "nothing"


def chat_template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template, of all named ones if there are several; "" if the tokenizer has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def weights_hash(source: str | Path | Mapping[str, Any], adapter: str | Path | None = None) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a model's tensors, in the order of their names.

    How tensors are split over files does not matter. A folder and the state dict of the model that was loaded from it
    may have different hashes, because a state dict repeats tied tensors and may have another dtype.

    Args:
        source: a folder with `*.safetensors`, one such file, or a state dict of torch tensors.
        adapter: folder of a PEFT adapter on top of it. Its tensors, and the settings that scale them, are hashed too.

    Raises:
        ConfigError: if the folder holds no safetensors file, or a file is damaged.
    """
    parts = _state_dict_tensors(source) if isinstance(source, Mapping) else _folder_tensors(Path(source))
    digest = hashlib.sha256(b"opd-weights-1")
    for name, dtype, shape, content in sorted(parts):
        digest.update(json.dumps([name, dtype, shape, content]).encode())
    if adapter is not None:
        settings = adapter_settings(Path(adapter))
        scale = {key: settings.get(key) for key in _SCALES}
        digest.update(json.dumps([weights_hash(adapter), scale], sort_keys=True).encode())
    return digest.hexdigest()


# The settings of an adapter that change the product which is added to the weights.
_SCALES = ("r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


def head_hash(head: Head) -> str:
    """SHA-256 of an output head's weight, bias, dtype, logit scale and soft-cap; `head.hash` is ignored."""
    digest = hashlib.sha256(b"opd-head-1")
    bias_shape = None if head.bias is None else head.bias.shape
    digest.update(json.dumps([head.dtype, head.weight.shape, bias_shape]).encode())
    digest.update(struct.pack("<ff", head.logit_scale, head.soft_cap))
    for array in (head.weight, head.bias):
        if array is not None:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _backend(tokenizer: Any) -> Any:
    return getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None) or tokenizer


def _pieces(tokenizer: Any) -> Iterator[tuple[int, bytes]]:
    """Each id with the bytes of its text, in ascending order."""
    added = _added_ids(tokenizer, _backend(tokenizer))
    to_bytes = _piece_decoder(_backend(tokenizer))
    # Sorted by id and piece: the order of a vocabulary differs between libraries.
    for piece, token_id in sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0])):
        yield token_id, piece.encode("utf-8") if token_id in added else to_bytes(piece)


def special_ids(tokenizer: Any) -> set[int]:
    """Ids that stand for an event, such as the end of a turn: typing their text does not produce them."""
    backend = _backend(tokenizer)
    found = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    decoder = getattr(backend, "get_added_tokens_decoder", None)
    if decoder is not None:
        found |= {int(i) for i, token in decoder().items() if token.special}
    return found


def _added_ids(tokenizer: Any, backend: Any) -> set[int]:
    """Ids whose piece is literal text, however ordinary pieces are spelled."""
    decoder = getattr(backend, "get_added_tokens_decoder", None)
    if decoder is not None:
        return {int(i) for i in decoder()}
    return {int(i) for i in getattr(tokenizer, "added_tokens_decoder", {})}


def _piece_decoder(backend: Any) -> Any:
    """A function from a piece, as the vocabulary spells it, to the bytes that it stands for."""
    try:
        spec = json.loads(backend.to_str()).get("decoder")
    except AttributeError:
        return lambda piece: piece.encode("utf-8")
    steps = list(_decoder_steps(spec))
    if any(step.get("type") == "ByteLevel" for step in steps):
        # A tokenizer may be saved with its pieces in either spelling; the fingerprint is of the bytes that they stand
        # for.
        table = {char: byte for byte, char in _byte_level_alphabet().items()}

        def byte_level(piece: str) -> bytes:
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode("utf-8")

        return byte_level
    # Llama 2 and its relatives have no Metaspace step; another step replaces its sign by a space.
    if any(step.get("type") in ("Metaspace", "ByteFallback") for step in steps) or any("▁" in str(s) for s in steps):

        def sentencepiece(piece: str) -> bytes:
            match = _BYTE_FALLBACK.match(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode("utf-8")

        return sentencepiece
    return lambda piece: piece.encode("utf-8")


def _decoder_steps(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if spec is None:
        return
    if spec.get("type") == "Sequence":
        for step in spec["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield spec


def _byte_level_alphabet() -> dict[int, str]:
    """GPT-2's map from each byte to the printable character that stands for it in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            # As in GPT-2, bytes without a printable character get the code points from 256 on, in their order.
            table[byte] = chr(256 + len(table) - len(printable))
    return table


_Tensor = tuple[str, str, list[int], str]


def _folder_tensors(path: Path) -> Iterator[_Tensor]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {path} holds no *.safetensors file; save the model as safetensors.")
    for file in files:
        yield from _file_tensors(file)


def _file_tensors(file: Path) -> Iterator[_Tensor]:
    """Tensors of a safetensors file, with their contents hashed through a memory map, one tensor at a time."""
    try:
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
        header_size = int(struct.unpack("<Q", bytes(mapped[:8]))[0])
        # A slice beyond the end is silently shorter.
        if header_size > len(mapped) - 8:
            raise ValueError("the header is cut off")
        header = json.loads(bytes(mapped[8 : 8 + header_size]))
        base = 8 + header_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= len(mapped) - base:
                raise ValueError(f"tensor {name!r} lies outside the file")
            # Hashed through the map: a copy of a tensor might not fit into the memory that is left.
            content = hashlib.sha256(mapped[base + start : base + end].data).hexdigest()
            yield name, entry["dtype"], list(entry["shape"]), content
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"weights file {file} cannot be read: {error}; save it again.") from error


_TORCH_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def _state_dict_tensors(state: Mapping[str, Any]) -> Iterator[_Tensor]:
    import torch

    for name, tensor in state.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        content = hashlib.sha256(flat.data).hexdigest()
        yield name, _TORCH_NAMES.get(kind, kind), list(tensor.shape), content
