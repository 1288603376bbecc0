"""`opd plan RECIPE`: estimates a run's memory, time and network traffic without loading any weights."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.printable import echo
from student.job.arguments import Overrides


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="Recipe of the student job.")],
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option("--hardware", help="Device of a rank: here, b200, h200, h100, a100, a100-40, l40s or rtx4090."),
    ] = "here",
    ranks: Annotated[int, typer.Option(min=1, help="Number of data-parallel processes, one device each.")] = 1,
    mean_tokens: Annotated[
        float, typer.Option(help="Mean tokens per response; 0 means half of rollout.max_new_tokens.")
    ] = 0.0,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            help="Model of the teachers, as NAME=MODEL if the recipe names several; may be given several times."
        ),
    ] = None,
    teacher_gpus: Annotated[int, typer.Option(min=1, help="Total number of devices of all teacher servers.")] = 1,
    teacher_hardware: Annotated[str, typer.Option(help="Device of a teacher server. Default: that of a rank.")] = "",
) -> None:
    """Estimate a run's memory per rank, step time by stage (teachers included) and network traffic.

    Memory is counted from the model's shapes, and the tests compare it with measurements. Times are computed under the
    assumptions of student/sizing/times.py. A run that cannot fit is refused, with the setting to change.
    """
    from opd.config import load_settings
    from student.job.plugins import build_plugins
    from student.model.model_path import check_model_path
    from student.settings.recipe import Recipe

    job = load_settings(Recipe, recipe, overrides or ())
    # Before the slow imports, so that a wrong plug-in setting or model name is reported at once.
    build_plugins(job)
    check_model_path(job.model.path)
    from student.sizing.hardware import hardware
    from student.sizing.teachers import fleet_of

    device = hardware(on)
    fleet = fleet_of(teacher or (), hardware(teacher_hardware) if teacher_hardware else device, teacher_gpus)
    for line in describe(job, device, ranks=ranks, mean=mean_tokens, fleet=fleet):
        echo(line)


def describe(recipe: Any, device: Any, *, ranks: int = 1, mean: float = 0.0, fleet: Any = None) -> Iterator[str]:
    """Give the plan line by line.

    Args:
        recipe: the job, a `Recipe`.
        device: the `Hardware` of a rank.
        ranks: number of data-parallel processes.
        mean: mean tokens per response; 0 means half of rollout.max_new_tokens.
        fleet: the `Fleet` of the teachers; None if nothing is known of them.

    Raises:
        ConfigError: at once for a mean that no response can have, or a teacher that the recipe does not ask; after the
            last line if the run cannot fit, or if the teachers cannot.
    """
    from opd.errors import ConfigError
    from student.job.learns_early import learns_early
    from student.job.plugins import build_plugins
    from student.sizing.advice import at_precision, faster
    from student.sizing.lengths import largest, lengths_of
    from student.sizing.memory import check_fits, memory_of, micro_batch, slots
    from student.sizing.shared import shared_of
    from student.sizing.teachers import Fleet, asks_of
    from student.sizing.times import times_of

    longest = recipe.rollout.max_new_tokens
    if not 0 <= mean <= longest:
        raise ConfigError(f"--mean-tokens is {mean:g}; set it to a number from 0 to rollout.max_new_tokens, {longest}.")
    plugins, fleet = build_plugins(recipe), fleet or Fleet({}, device)
    needs = plugins.needs
    asks = asks_of(recipe, needs)
    fleet.check_names(asks)
    early = any(ask.served for ask in asks) and learns_early(recipe, plugins)
    shape = shape_of(recipe, device)
    mean = mean or longest / 2
    shared, why = shared_of(recipe, shape, plugins, mean=mean, gpu=device.gpu, ranks=ranks)
    memory = memory_of(recipe, shape, needs, device, gpu=device.gpu, ranks=ranks, shared=shared)
    rows, width = micro_batch(recipe, ranks)
    yield f"student of {_parameters(shape.total)} parameters, {_parameters(shape.trained)} trained, on {device.name}"
    yield f"micro-batch of {rows} x {width} tokens, {slots(recipe, ranks)} responses decoded together"
    row, limit = largest(recipe), recipe.train.micro_batch_tokens
    if row.sequences > 1:
        over = row.sequences * row.width > limit
        yield (
            f"  an episode is read in up to {row.sequences} windows of {row.width} tokens, which share a micro-batch"
            + (f": more than train.micro_batch_tokens, {limit}" if over else "")
        )
    yield from _of_memory(memory, device)
    spared = 0.0 if shared is None else shared.spared

    def timed(job: Any, on: Any) -> Any:
        return times_of(job, shape, needs, on, mean=mean, ranks=ranks, fleet=fleet, early=early, spared=spared)

    times = timed(recipe, at_precision(recipe, device))
    yield f"a step of {times.tokens:.0f} response tokens ({mean:.0f} each) on {ranks} rank(s), by arithmetic:"
    read = lengths_of(recipe, recipe.rollout.max_prompt_tokens / 2, mean)
    if row.sequences > 1:
        yield f"  each read in {read.sequences} windows, {read.positions:.0f} tokens with their prompts"
    if why:
        yield f"  learning reads a prompt again for each of its rows: {why}"
    elif shared is not None:
        yield f"  learning reads a prompt once for all rows of a micro-batch, {spared / read.positions:.0%} less"
    for stage, seconds in times.stages.items():
        yield f"  {stage:10} {seconds:9.2f} s, bound by {times.bound[stage]}"
    yield from _of_teachers(times, fleet, asks)
    yield f"  network {times.sent / 1e6:.1f} MB to teachers, {times.received / 1e6:.1f} MB from them"
    if ranks > 1:
        yield f"  between ranks {times.exchanged / 1e9:.1f} GB to each"
    yield from faster(recipe, plugins, device, timed)
    fleet.check_fits(asks)
    check_fits(memory, device, recipe, ranks=ranks)


def _of_memory(memory: Any, device: Any) -> Iterator[str]:
    """Give the lines on what a rank holds at which time, and what its device has."""
    from student.sizing.hardware import GIB

    for title, parts in (("always", memory.always), ("learning", memory.learning), ("rollout", memory.rollout)):
        for name, size in parts.items():
            if size:
                yield f"  {title:9} {name:36} {size / GIB:9.3f} GiB"
    for title, name in memory.unknown:
        yield f"  {title:9} {name:36} not known for this family"
    room = f"{device.memory / GIB:.1f} GiB of memory, {device.reserve / GIB:.1f} of it for libraries"
    beside = ", without what is not known" if memory.unknown else ""
    yield f"peak of a rank {memory.peak / GIB:.3f} GiB{beside}; the device has {room}"


def _of_teachers(times: Any, fleet: Any, asks: Any) -> Iterator[str]:
    """Give the lines on where the teachers run, the time of a step, and which stage bounds it."""
    from student.sizing.hardware import GIB

    unknown = fleet.unknown(asks)
    if "teachers" in times.stages:
        weights = fleet.weights(asks) / GIB
        yield f"  teachers on {fleet.devices} x {fleet.device.name}, {weights:.1f} GiB of weights once"
    if unknown:
        which = ", ".join(name for name in unknown if name)
        which = f"of {which} " if which else ""
        option = f"--teacher {'NAME=' if which else ''}MODEL"
        yield f"  scoring time {which}unknown: describe the model with {option} (opd plan)"
    without = "" if not unknown else ", not counting the scoring"
    yield f"  {times.tokens / times.step:.0f} response tokens per second, a step of {times.step:.2f} s{without}"
    slowest, teachers = times.slowest, times.stages.get("teachers", 0.0)
    enough = ""
    if slowest == "teachers":
        enough = f"; {math.ceil(fleet.devices * teachers / times.rivals)} devices of theirs would not delay it"
    yield f"  the step is bound by {slowest}{enough}"


def shape_of(recipe: Any, device: Any) -> Any:
    """The `ModelShape` of the recipe's student, with the precision in which it trains on `device`."""
    import torch

    from student.sizing.shape import ModelShape

    mixed = recipe.train.mixed_precision
    half = mixed == "bf16" or (mixed == "auto" and device.gpu)
    return ModelShape(recipe.model, torch.bfloat16 if half else None, sharded=recipe.train.sharding == "fsdp")


def _parameters(count: float) -> str:
    """A number of parameters in thousands or millions."""
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count / 1e3:.1f} k"
