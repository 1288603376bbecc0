"""Generate the gRPC stubs: python scripts/protos.py [OUT], by default into the source tree."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = "opd/wire/v1/teacher.proto"


def generate(out: Path) -> None:
    """Write teacher_pb2.py, teacher_pb2.pyi and teacher_pb2_grpc.py below `out`/opd/wire/v1."""
    from grpc_tools import protoc

    flags = [f"-I{ROOT / 'protos'}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", PROTO]
    if protoc.main(["protoc", *flags]) != 0:
        raise SystemExit(f"protoc failed on {PROTO}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
