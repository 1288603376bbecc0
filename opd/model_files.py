"""Refusing files of a model or adapter that are not what their names say, before a library reads them.

Libraries report these as files that do not exist, as damaged ones without a name, or, for a pipe, not at all.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, one_line

_POINTER = b"version https://git-lfs.github.com/spec/"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def check_files(folder: Path) -> None:
    """Refuse a folder's weights, config or tokenizer that cannot be read, and weights without a valid header.

    Files that are not there are left to those who need them.

    Args:
        folder: folder of a model or of a PEFT adapter; anything else passes.

    Raises:
        ConfigError: naming the file.
    """
    check_readable(folder)
    for file in weight_files(folder) if folder.is_dir() else ():
        tensor_headers(file)


def check_readable(folder: Path) -> None:
    """The part of `check_files` that looks at no header."""
    if not folder.is_dir():
        return
    for file in sorted([*folder.glob("*.json"), *folder.glob("tokenizer.model")]):
        _check_whole(file, "file")
    for file in weight_files(folder) or sorted(folder.glob("pytorch_model*.bin")):
        _check_whole(file, "weights file")


def weight_files(folder: Path) -> list[Path]:
    """The weights that transformers reads from a folder: those of its index, else all safetensors files.

    Raises:
        ConfigError: if the index is damaged, or names a file elsewhere, or a missing file.
    """
    index = folder / _INDEX
    if (folder / _WHOLE).exists() or not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is damaged: {one_line(error, 200)}; copy or download it again.") from error
    for name in sorted(names):
        if Path(name).name != name:
            raise ConfigError(f"{index} names weights outside its folder, {name!r}; save the model again.")
        if not (folder / name).exists() and not (folder / name).is_symlink():
            raise ConfigError(f"weights file {folder / name} is missing, though {_INDEX} names it; copy it there.")
    return [folder / name for name in sorted(names)]


def tensor_headers(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor of a safetensors file, as its header has them.

    Raises:
        ConfigError: at once, if the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        reason = one_line(error, 200)
        raise ConfigError(f"weights file {file} is damaged: {reason}; copy or download it again.") from error

    def read() -> Iterator[tuple[str, tuple[int, ...], str]]:
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                part = tensors.get_slice(name)
                yield name, tuple(part.get_shape()), str(part.get_dtype())

    return read()


def _check_whole(file: Path, kind: str) -> None:
    if file.is_symlink() and not file.exists():
        raise ConfigError(
            f"{kind} {file} is a link to {os.readlink(file)}, which does not exist; copy what the link leads to, too "
            "(cp -rL), or download the model again."
        )
    if not file.is_file():
        raise ConfigError(f"{kind} {file} is not a regular file; give the folder that save_pretrained wrote.")
    if not os.access(file, os.R_OK):
        raise ConfigError(f"{kind} {file} cannot be read: Permission denied; change its mode or owner.")
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ConfigError(
                f"{kind} {file} is a git-lfs pointer in place of the file itself, which was not fetched; run git lfs "
                f"pull in {file.parent}, or download the model with hf download."
            )
