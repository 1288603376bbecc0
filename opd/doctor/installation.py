"""The installed packages: those that opd requires, with their version ranges, and the optional engines."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

from opd.doctor.finding import Finding


def examine_installation() -> Iterator[Finding]:
    """Findings about required packages and optional engines."""
    from packaging.requirements import Requirement

    try:
        requires = distribution("opd").requires or []
    except PackageNotFoundError:
        yield Finding("fail", "opd", "is not installed; run `pip install -e .` in the checkout")
        return
    complete = True
    for requirement in map(Requirement, requires):
        # Without extras: what opd needs in any case.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(requirement.name)
        except PackageNotFoundError:
            complete = False
            yield Finding("fail", requirement.name, f"is missing; install '{requirement}'")
            continue
        if not requirement.specifier.contains(have, prereleases=True):
            complete = False
            yield Finding(
                "fail", requirement.name, f"version {have} is outside the required range; install '{requirement}'"
            )
    if complete:
        yield Finding("ok", "opd", f"{version('opd')} with its required packages")
    for engine in ("vllm", "sglang", "triton"):
        try:
            yield Finding("ok", engine, version(engine))
        except PackageNotFoundError:
            yield Finding("note", engine, "is not installed (optional)")
