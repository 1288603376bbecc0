"""Generate the gRPC stubs: python scripts/protos.py [OUT], by default into the source tree."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ("opd/wire/v1/teacher.proto", "opd/wire/v1/admin.proto", "opd/wire/v1/judge.proto")


def generate(out: Path) -> None:
    """Write X_pb2.py, X_pb2.pyi and X_pb2_grpc.py of each proto below `out`/opd/wire/v1."""
    from grpc_tools import protoc

    flags = [f"-I{ROOT / 'protos'}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *flags, *PROTOS]) != 0:
        raise SystemExit("protoc failed; its message is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
