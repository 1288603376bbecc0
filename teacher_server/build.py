"""From settings to engines: which class, which arguments, and which models may run their own code."""

import inspect
from collections.abc import Mapping
from typing import Any

from opd.adapters import split_adapter
from opd.errors import ConfigError
from teacher_server.engines import ENGINES
from teacher_server.engines.base import Engine
from teacher_server.residency.starting import EngineFactory
from teacher_server.settings import ServerSettings


def engine_factory(settings: ServerSettings) -> EngineFactory:
    """A function that builds the configured engine for a model path or hub id.

    A setting that the engine class does not accept is refused if it differs from its default, and never silently
    dropped.

    Raises:
        ConfigError: for an unknown engine, an argument that it does not accept, or a malformed allow-list entry.
    """
    allowed = _allow_list(settings.security.trust_remote_code)
    loaded = ENGINES.load(settings.engine.engine)
    if not inspect.isclass(loaded):
        raise ConfigError(
            f"engine {settings.engine.engine!r} is not an engine class; `opd plugins list` names the engines."
        )
    cls: Any = loaded
    accepted = inspect.signature(cls).parameters
    arguments = _arguments(settings, accepted)

    def build(model: str) -> Engine:
        if split_adapter(model)[1] is not None and not getattr(cls, "takes_adapters", False):
            raise ConfigError(
                f"engine {settings.engine.engine!r} takes no adapters, but the model is {model!r}; make one model of "
                "the two with `opd merge OUT BASE+ADAPTER`, or use engine transformers."
            )
        engine: Engine = cls(model, **arguments, **_remote_code(model, allowed, settings.engine.engine, accepted))
        return engine

    return build


def _arguments(settings: ServerSettings, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """What the configured engine class, which takes the parameters `accepted`, is made with besides the model."""
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    standard: dict[str, tuple[Any, Any]] = {
        "device": (settings.engine.device, "auto"),
        "dtype": (settings.engine.dtype, "auto"),
        "deterministic": (settings.engine.deterministic, False),
        # Value and default are equal here: the server enforces these limits itself, so an engine need not accept them.
        "max_batch_tokens": (settings.limits.max_batch_tokens, settings.limits.max_batch_tokens),
        "max_k": (settings.limits.max_k, settings.limits.max_k),
    }
    arguments: dict[str, Any] = {}
    for name, (value, default) in standard.items():
        if name in accepted:
            arguments[name] = value
        elif value != default:
            raise ConfigError(
                f"engine {settings.engine.engine!r} does not support {name}, which is set to {value!r}; leave it out."
            )
    for name, value in settings.engine.options.items():
        if name not in accepted and not takes_any:
            known = ", ".join(n for n in accepted if n not in ("self", "model"))
            raise ConfigError(f"engine {settings.engine.engine!r} takes no option {name!r}; it takes {known}.")
        # As an option it would apply to every model of the server; the allow-list names one model at one commit.
        if name == "trust_remote_code":
            raise ConfigError("trust_remote_code is not an engine option; allow one model with --trust-remote-code.")
        arguments[name] = value

    for name, parameter in accepted.items():
        wanted = parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if wanted and name not in arguments:
            raise ConfigError(
                f"engine {settings.engine.engine!r} needs option {name!r}; pass --engine-option {name}=VALUE."
            )
    return arguments


def _allow_list(entries: tuple[str, ...]) -> dict[str, str]:
    allowed = {}
    for entry in entries:
        model, _, revision = entry.rpartition("@")
        if not model or len(revision) != 40 or not all(c in "0123456789abcdef" for c in revision):
            raise ConfigError(
                f"trust_remote_code entry {entry!r} must be MODEL@REVISION with a commit hash of 40 hex digits, "
                "because a branch name could be moved to other code."
            )
        allowed[model] = revision
    return allowed


def _remote_code(model: str, allowed: dict[str, str], engine: str, accepted: Any) -> dict[str, Any]:
    if model not in allowed:
        return {}
    if "trust_remote_code" not in accepted or "revision" not in accepted:
        raise ConfigError(
            f"engine {engine!r} cannot run the own code of model {model!r} at a pinned revision; use another engine."
        )
    return {"trust_remote_code": True, "revision": allowed[model]}
