"""Refusing at once a model that cannot be had: a path that does not exist, or an id while the hub cannot be reached."""

import re
from pathlib import Path

from opd.errors import ConfigError, UnavailableError
from opd.model_files import check_files

_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
"""NAME or OWNER/NAME, as on the hub."""


def refuse_missing(model: str) -> None:
    """Refuse a model that cannot be had.

    That is a name that can only be a folder but is none, a file, a folder with files that cannot be read (see
    `check_files`), and an id that the hub's cache does not have while the hub cannot be reached.

    What cannot be a hub id is a path. If the hub's cache does not have the model, so is OWNER/NAME with a folder OWNER
    here, and a bare NAME: nearly all models have an owner, and without a network the hub takes a minute to say no.

    Args:
        model: folder or hub id.

    Raises:
        ConfigError: naming the nearest folder that exists, or the file.
        UnavailableError: if the hub cannot be reached. What it answers is left to those who load the model.
    """
    path = Path(model).expanduser()
    refuse_file(path)
    check_files(path)
    if path.exists():
        return
    there = next(parent for parent in path.absolute().parents if parent.is_dir())
    if _ID.fullmatch(model) is None:
        raise ConfigError(f"model folder {model} does not exist, though {there} does; give a folder or a hub id.")
    if _is_cached(model):
        return
    if "/" not in model:
        raise ConfigError(
            f"model {model!r} is not a folder here, and the hub's cache has no model of that name; name a folder, or a "
            "hub id with its owner, like Qwen/Qwen3-1.7B."
        )
    if there == path.absolute().parent != Path.cwd():
        raise ConfigError(
            f"model folder {model} does not exist, though {there} does; if it is a hub id, get it first: hf download "
            f"{model}."
        )
    _ask_hub(model)


def refuse_file(model: str | Path) -> None:
    """Refuse a file in place of a model's folder, and say how a GGUF file becomes one.

    Raises:
        ConfigError: if `model` is a file.
    """
    path = Path(model).expanduser()
    if not path.is_file():
        return
    if path.suffix == ".gguf" or path.open("rb").read(4) == b"GGUF":
        raise ConfigError(
            f"model {str(model)!r} is a GGUF file; convert it into a folder and name that: opd convert {model} OUT."
        )
    raise ConfigError(f"model {str(model)!r} is a file; give the folder that save_pretrained wrote.")


def _ask_hub(model: str) -> None:
    """Ask the hub once for a model. The libraries ask for each file, and repeat what fails for most of a minute.

    Raises:
        UnavailableError: if the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=["config.json"])  # one request, with the hub's usual timeout
    except Exception as error:  # many classes; that the hub lacks the model is said in the words of who loads it
        # A hub that was reached and is slow is left to the libraries, which wait again. By name, because the client's
        # package depends on the version.
        if hub_is_away(error) and type(error.__cause__).__name__ != "ReadTimeout":
            raise hub_away(model) from error


def hub_is_away(error: BaseException) -> bool:
    """Whether a model could not be fetched because the hub cannot be reached, which may pass, as after a reboot.

    False if the hub answered that it has no such model, and if this machine is told not to ask it (HF_HUB_OFFLINE).
    """
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    # What the libraries raise has the first of these among its causes, which in turn has the error of the network.
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(each, OfflineModeIsEnabled) for each in causes):
        return False
    return any(isinstance(each, LocalEntryNotFoundError) and each.__cause__ is not None for each in causes)


def hub_away(model: str) -> UnavailableError:
    """The error for a model that has no folder here and cannot be fetched, see `hub_is_away`."""
    return UnavailableError(
        f"model {model!r} is not a folder here, and the hub cannot be reached for it; try again, or name a folder."
    )


def _is_cached(model: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return (Path(HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")).is_dir()
