"""Write all generated pages of docs/: python scripts/pages.py."""

import runpy
from pathlib import Path

WRITERS = ("metrics_doc.py", "recipe_doc.py", "rl_doc.py", "methods_doc.py")
"""Each can also be run by itself."""

if __name__ == "__main__":
    for writer in WRITERS:
        runpy.run_path(str(Path(__file__).with_name(writer)), run_name="__main__")
