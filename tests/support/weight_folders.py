"""Model folders of which the sizes of the weights are all that matters."""

from pathlib import Path


def weight_folders(root: Path, **sizes: int) -> dict[str, str]:
    """Folders below `root` by name, with so many bytes of weights each."""
    models = {}
    for name, size in sizes.items():
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(bytes(size))
        models[name] = str(root / name)
    return models
