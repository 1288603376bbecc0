"""The part of docs/performance.md that shows what was measured on a GPU, written from the sections of `make gpu`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- begin: python benchmarks/gpu.py --publish FILE -->", "<!-- end -->"


@dataclass(frozen=True)
class Table:
    """Records of a section.

    Attributes:
        section: its name.
        key: of the records within it.
        about: what was measured.
        columns: field to its unit or meaning.
    """

    section: str
    key: str
    about: str
    columns: Mapping[str, str]


TABLES = (
    Table(
        "tests",
        "figures",
        "tests of the mathematics, of the engines and of short trainings",
        {
            "tests": "folder or file of the tests",
            "passed": "number that passed",
            "failed": "number that failed",
            "skipped": "number that were skipped",
        },
    ),
    Table(
        "kernels",
        "figures",
        "exact divergences, forward and backward",
        {
            "kind": "which divergence",
            "tokens": "number of tokens N",
            "who": "which implementation",
            "seconds": "seconds of a forward and backward pass",
            "time_ratio": "those seconds over the materialised form's",
            "extra_mib": "memory above inputs and gradients, MiB",
            "memory_ratio": "that memory over the materialised form's",
            "of_flop_floor": "seconds over those of the four matrix products alone",
            "of_byte_floor": "seconds over those of the memory traffic alone",
        },
    ),
    Table(
        "race",
        "figures",
        "a teacher of random weights against vLLM's `prompt_logprobs`, the same rows",
        {
            "k": "ids per token",
            "who": "which engine",
            "seconds": "seconds for all rows",
            "response_tokens_per_second": "response tokens scored per second",
            "of_vllm": "that rate over vLLM's",
            "mfu": "FLOP/s as a share of the device's peak",
            "nats_from_opd": "largest difference of log-probs from opd's, in nats",
        },
    ),
    Table(
        "job",
        "figures",
        "a short distillation, teacher and student on one device",
        {
            "step_seconds": "seconds of a step",
            "response_tokens_per_second": "response tokens per second",
            "teacher_seconds": "seconds of the teacher's engine per step",
            "teacher_share": "those seconds as a share of the step",
            "wait_share": "share of the step in which the student waits for scores",
            "mfu": "FLOP/s of both models as a share of the peak",
            "learn_mfu": "FLOP/s while the student learns, as a share of the peak",
        },
    ),
    Table(
        "job",
        "plan",
        "what `opd plan` says of that job",
        {
            "stage": "stage of a step",
            "planned_seconds": "planned seconds",
            "seconds": "measured seconds",
            "ratio": "planned over measured",
        },
    ),
)


def render(sections: Mapping[str, Any]) -> str:
    """Markdown of all tables: figures where there are any, the fields and their meaning everywhere."""
    lines = [] if sections else ["**No GPU figure has been measured yet.** The fields of the file, by section:"]
    for table in TABLES:
        section = sections.get(table.section, {})
        records = section.get(table.key, ())
        lines += ["", f"`{table.section}`, `{table.key}`: {table.about}." + ("" if records else " Not measured yet.")]
        if section:
            lines.append(_where(section))
        if "error" in section:
            lines.append(f"This part failed: {_cell(section['error'].splitlines()[-1])}.")
        lines += ["", *_rows(table.columns, records)]
    return "\n".join(lines).strip() + "\n"


def write_page(sections: Mapping[str, Any], page: Path = PAGE) -> None:
    """Replace what stands between the two comments of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{render(sections)}{END}{after}")


def _where(section: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in section["versions"].items())
    return f"{section['machine']['device']}, {section['began'][:10]}, `{section['command']}`; {versions}."


def _rows(columns: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(f'`{name}`' for name in columns)} |"
    yield f"|{' --- |' * len(columns)}"
    yield f"| {' | '.join(columns.values())} |"
    for record in records:
        cells = [_cell(record.get(name)) for name in columns]
        reason = record.get("skipped") or record.get("error")
        if reason:
            cells[-1] = f"{'skipped' if 'skipped' in record else 'failed'}: {_cell(reason)}"
        yield f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")
