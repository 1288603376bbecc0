"""Write docs/rl.md from the code: python scripts/rl_doc.py [OUT]."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTRO = """# Policy losses and advantages

Written by `python scripts/rl_doc.py`; a test fails when it is out of date. `opd plugins show NAME` prints the formula,
its source, what the plug-in needs, and every setting with its default. Evidence says how a formula is known: from the
paper's text and released code, from its text, from its abstract or notes on it, or inferred. Golden numbers of all of
them are in `tests/student/rl`.

A policy loss is a term of the objective. It asks a chain of advantages for the credit of each row or token: one
estimator, then any modifiers. Most losses differ from REINFORCE only where the student has left the policy that
sampled, so set `train.minibatches` or `train.epochs`.

```yaml
objective:
  - name: cispo
    cap: 5
    aggregation: prompt_mean
    advantage: [{name: lite_ppo}, {name: sngs}]
train: {minibatches: 4}
```
"""


def table(registry: Any, folder: str) -> str:
    """A row per plug-in of `student.rl` below `folder`."""
    lines = ["| name | what it is | evidence | file |", "| --- | --- | --- | --- |"]
    for entry in registry:
        module, _, _ = entry.path.partition(":")
        if not module.startswith(f"student.rl.{folder}"):
            continue
        plugin = registry.load(entry.name)
        file = module.replace(".", "/") + ".py"
        lines.append(f"| `{entry.name}` | {entry.summary} | {plugin.evidence} | `{file}` |")
    return "\n".join(lines)


def render() -> str:
    """The whole document."""
    from student.rl import ADVANTAGES, OBJECTIVES

    losses, advantages = table(OBJECTIVES, "losses"), table(ADVANTAGES, "advantages")
    return f"{INTRO}\n## Policy losses (`objective:`)\n\n{losses}\n\n## Advantages (`advantage:`)\n\n{advantages}\n"


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "rl.md"
    out.write_text(render(), encoding="utf-8")
