"""Engines, which run teacher models behind the protocol `teacher_server.engines.base.Engine`.

`ENGINES` maps names to engine classes, which are called as `cls(model, **options)`. Third parties add names through the
entry-point group `opd.engines`. Listing the names imports neither torch nor any engine.
"""

from opd.registry import Registry

ENGINES = Registry(
    "engine",
    "opd.engines",
    names={
        "transformers": "teacher_server.engines.transformers:TransformersEngine",
        "vllm": "teacher_server.engines.vllm:VllmEngine",
        "vllm_server": "teacher_server.engines.vllm_server:VllmServerEngine",
        "sglang": "teacher_server.engines.sglang:SglangEngine",
    },
)
