"""The reward that docs/plugins.md writes rewards rows."""

import re
from pathlib import Path
from typing import Any

from opd.config import parse_settings

PAGE = Path(__file__).resolve().parents[4] / "docs" / "plugins.md"


def test_the_reward_of_the_documentation_works(make_row: Any, services: Any) -> None:
    (code,) = re.findall(r"```python\n(# brief\.py\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
    module: dict[str, Any] = {}
    exec(compile(code, "brief.py", "exec"), module)
    reward = module["Brief"](parse_settings(module["BriefSettings"], {"name": "brief"}))
    rows = [make_row(value=1.0, length=n, sample=n) for n in (5, 3)]
    reward.reward(rows, services)
    assert [row.reward_parts["brief"] for row in rows] == [0.0, 0.1]
