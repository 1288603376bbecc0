"""`python -m faulty_server --fault PLAN ...`: a teacher server that fails on purpose, else as `opd serve ...`."""

import sys
from functools import partial

from faults import FaultyServer

from teacher_server import server
from teacher_server.__main__ import main

if __name__ == "__main__":
    at = sys.argv.index("--fault")
    _, plan = sys.argv[at : at + 2]
    del sys.argv[at : at + 2]
    server.TeacherServer = partial(FaultyServer, fault=plan)  # type: ignore[assignment, misc]
    main()
