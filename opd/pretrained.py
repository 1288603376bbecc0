"""Reading the config, the tokenizer and the weights of a causal language model with transformers.

transformers gives random numbers to parameters that the files lack, leaves out tensors that the model has no place for,
and says both in its log only. Here each is an error, as is whatever else is wrong with the files. torch and
transformers are imported by the functions, because it takes seconds.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, OpdError, one_line
from opd.model_files import check_files, tensor_headers, weight_files
from opd.model_path import hub_away, hub_is_away, refuse_file
from opd.tokenizer_files import has_tokenizer, lacks_bos, read_otherwise

_log = logging.getLogger(__name__)
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.", "module.")
"""What torch.compile, FSDP, gradient checkpointing, PEFT and DDP put into the names of tensors that they wrap."""

_WITHOUT_EFFECT = re.compile(r"rotary_emb|inv_freq|masked_bias|(attn|attention)\.bias$|position_ids|[qkv]_scale|_amax$")
"""Buffers that older versions saved and that are computed now, and scales of a cache in 8 bits."""


def read_config(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model.

    Args:
        path: folder or hub id.
        revision: revision of a hub id.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ConfigError: if there is none, or it cannot be read.
        UnavailableError: if the hub cannot be reached for it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # validators and damaged files raise many classes
        raise _cannot_read(path, error, "the config of model") from error


def read_tokenizer(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer that is saved with a model.

    Logs if it splits text otherwise than its own file says, or puts no BOS before texts although the model has one.

    See `read_config` for arguments and errors.
    """
    from transformers import AutoTokenizer

    if (Path(path) / "config.json").is_file() and not has_tokenizer(path):
        raise ConfigError(
            f"model folder {str(path)!r} has no tokenizer; copy the tokenizer files of the model that it was made from "
            "there."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        warnings = (read_otherwise(tokenizer, path), lacks_bos(tokenizer, _raw_config(path, revision)))
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise _cannot_read(path, error, "the tokenizer of model") from error
    for warning in filter(None, warnings):
        _log.warning("%s", warning)
    return tokenizer


def _raw_config(path: str | Path, revision: str | None) -> Mapping[str, Any]:
    """A model's config.json as it stands there; empty if there is none, as beside a tokenizer alone."""
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.get_config_dict(path, revision=revision)[0]
    except OSError:
        return {}


def read_causal_lm(path: str | Path, *, config: Any, **options: Any) -> Any:
    """A causal language model with every tensor taken from its files.

    Args:
        path: folder or hub id.
        config: what `read_config` gave.
        options: more arguments of transformers' from_pretrained.

    Raises:
        ConfigError: if it cannot be loaded, or its tensors are not those that the config calls for.
        UnavailableError: if the hub cannot be reached for it.
    """
    from transformers import AutoModelForCausalLM

    check_files(Path(path))
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except Exception as error:  # damaged files raise many classes
        raise _cannot_read(path, error, "model") from error
    model, report = loaded
    check_report(report, model, path)
    return model


def check_ids(tokenizer: Any, path: str | Path, revision: str | None = None) -> None:
    """Refuse a tokenizer that gives ids for which its model has no embedding, as an added token without resizing does.

    Raises:
        ConfigError: naming the first such token, or if the model's config cannot be read.
    """
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():  # a tokenizer alone
        return
    rows = getattr(read_config(path, revision=revision).get_text_config(), "vocab_size", None)
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if isinstance(rows, int) and i >= rows)
    if beyond:
        raise ConfigError(
            f"the tokenizer of model {str(path)!r} has {beyond[0][1]!r} of id {beyond[0][0]}, but the model has "
            f"embeddings for {rows} ids; resize them (resize_token_embeddings) or remove the token."
        )


def check_tensors(folder: Path, config: Any) -> None:
    """Refuse what `read_causal_lm` would refuse, from the headers of a folder's safetensors files alone.

    What can only be seen with the weights is left to loading them: other files, quantised weights, a model's own code.

    Raises:
        ConfigError: if the folder's tensors are not those that the config calls for.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    files = weight_files(folder) if folder.is_dir() else []
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not files or family is None or getattr(config, "quantization_config", None) is not None:
        return
    found = {name: torch.empty(shape, device="meta") for file in files for name, shape, _ in tensor_headers(file)}
    try:
        with quiet(logging.CRITICAL):
            model, report = family.from_pretrained(
                None,
                config=config,
                state_dict=found,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception:  # not every family can be built without weights
        _log.debug("the tensors of %s cannot be checked without loading them", folder, exc_info=True)
        return
    check_report(report, model, folder)


def check_report(report: Mapping[str, Any], model: Any, path: str | Path) -> None:
    """Refuse a model that transformers did not fill with exactly the tensors of its files.

    Raises:
        ConfigError: naming the first tensors, and what to do about names that a wrapper has changed.
    """
    missing, extra = sorted(map(str, report["missing_keys"])), sorted(map(str, report["unexpected_keys"]))
    refuse_wrapped(missing, extra, f"model {path}")
    other = [f"{name} of {list(there)} in place of {list(here)}" for name, there, here in report["mismatched_keys"]]
    if getattr(model, "hf_quantizer", None) is not None:  # its tensors have companions
        extra = []
    found = {"missing": missing, "mismatched": sorted(other), "unexpected": list(_used(extra, model))}
    for problem, names in found.items():
        if names:
            raise ConfigError(f"model {path} has {problem} keys: {some(names)}; its weights do not fit its config.")


def refuse_wrapped(missing: Collection[str], extra: Collection[str], what: str) -> None:
    """Refuse files whose tensors would fit but for what a wrapper has put into their names.

    Args:
        missing: the names that were not found.
        extra: the names that were found in excess.
        what: what is refused, for the message.

    Raises:
        ConfigError: saying how to rename them.
    """
    outer = {name.removesuffix(lost) for lost in [*missing][:1] for name in extra if name.endswith(f".{lost}")}
    for word in (*_WRAPPERS, *sorted(outer)) if missing else ():
        found = [name for name in extra if word in name and name.replace(word, "") in missing]
        if found:
            raise ConfigError(
                f"{what} has {word!r} in the names of its tensors ({found[0]}), because its wrapper was saved; save "
                "the model inside it, or rename them with safetensors.torch: "
                f"save_file({{k.replace({word!r}, ''): v for k, v in load_file(F).items()}}, F, {{'format': 'pt'}})."
            )


def some(names: Sequence[str]) -> str:
    """The first three of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _used(names: Iterable[str], model: Any) -> Iterator[str]:
    """Those of unexpected tensors that other models of the family would use: in a layer, further layers, a bias.

    Heads and towers that stand beside the language model belong to other tasks. Layers for predicting several tokens
    come after the others, and are not used here.
    """
    from torch.nn import ModuleList

    modules = dict(model.named_modules())
    predictors = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    for name in names:
        parts = name.split(".")
        above = [modules[stem] for n in range(len(parts)) if (stem := ".".join(parts[:n])) in modules]
        owner, part = above[-1], parts[len(above) - 1]  # the smallest module around the tensor, and the name within it
        if isinstance(owner, ModuleList) and part.isdigit() and int(part) - len(owner) < predictors:
            continue
        in_layer = any(isinstance(module, ModuleList) for module in above)
        if (in_layer or not list(owner.children())) and not _WITHOUT_EFFECT.search(name):
            yield name


def _cannot_read(path: str | Path, error: Exception, what: str) -> OpdError:
    folder = Path(path)
    refuse_file(path)
    if not folder.exists():
        if hub_is_away(error):
            return hub_away(str(path))
        return ConfigError(f"model {str(path)!r} is not a folder, and the hub does not provide it; check its path.")
    if not (folder / "config.json").is_file():
        hint = f"; did you mean {path}/model?" if (folder / "model").is_dir() else "."
        return ConfigError(f"model folder {str(path)!r} does not hold a model: it has no config.json{hint}")
    return ConfigError(f"{what} {str(path)!r} cannot be read: {one_line(error, 300)}.")


@contextmanager
def quiet(level: int | None = None) -> Iterator[None]:
    """Load without transformers' progress bars, and with its log from `level` on if that is given."""
    from transformers.utils import logging as theirs

    bars, before = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    if level is not None:
        theirs.set_verbosity(level)
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        if bars:
            theirs.enable_progress_bar()
