"""The student's weights on disk, from which servers load them: written once for all ranks, and named by their hash.

    FOLDER/<first 16 digits of the SHA-256 of all tensors>/model.safetensors, or a PEFT adapter
    FOLDER/*.lock    held while a rank writes, or has a server load: the other ranks then find it done

Ranks hold the same weights bit for bit, so they give them the same name; a rank that does not finds no server with its
own, and says so by the known row. A folder appears whole, under its name, or not at all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

_KEPT = 2
"""The weights of now, and those before, which a server goes back to when it cannot load the new ones."""


class WeightsFolder:
    """See the module.

    Args:
        root: the folder, which the servers see under the same path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._written: list[str] = []

    def lock(self, name: str) -> FileLock:
        """Of all ranks: for what is called `name`."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self.root / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock")

    def put(self, tensors: Mapping[str, Tensor], config: str, files: tuple[str, str]) -> tuple[str, Path]:
        """Have a folder with these weights; older ones but the last go.

        Args:
            tensors: on the host, contiguous.
            config: the JSON file beside them.
            files: names of the tensors' file and of the JSON file.

        Returns:
            The weights' label, and their folder.
        """
        label = label_of(tensors)
        folder = self.root / label
        with self.lock(label):
            if not folder.exists():
                # One that is there was left by a rank that was killed: under the lock nobody else writes it.
                part = self.root / f"{label}.part"
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                save_file(dict(tensors), part / files[0], metadata={"format": "pt"})
                (part / files[1]).write_text(config)
                os.replace(part, folder)
        self._written = [*(name for name in self._written if name != label), label]
        for old in self._written[:-_KEPT]:
            shutil.rmtree(self.root / old, ignore_errors=True)
        self._written = self._written[-_KEPT:]
        return label, folder

    def close(self) -> None:
        """Remove what was written."""
        for name in self._written:
            shutil.rmtree(self.root / name, ignore_errors=True)
        self._written = []
        if self.root.exists() and not any(path.is_dir() for path in self.root.iterdir()):
            shutil.rmtree(self.root, ignore_errors=True)


def label_of(tensors: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits of the SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
