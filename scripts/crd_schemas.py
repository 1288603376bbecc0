"""Condense CustomResourceDefinitions to what deploy/kubernetes uses: python scripts/crd_schemas.py PROJECT=CRD.yaml ...

Writes tests/deploy/schemas.json. For each kind it has the names of all fields on every level that a manifest here uses,
and the types, bounds, choices and required fields of those that are set. With it, the tests refuse a field that the
definition does not know, as a server with strict field validation does. Pod templates are left to the schema of
Kubernetes itself.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "deploy" / "schemas.json"
KEPT = ("type", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")


def manifests(kind: str, group: str) -> Iterator[dict[str, Any]]:
    """The manifests of a kind in deploy/kubernetes."""
    for path in sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            if isinstance(manifest, dict) and manifest.get("kind") == kind and group in manifest["apiVersion"]:
                yield manifest


def condense(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """The part of a schema that the values use."""
    groups = [value for value in values if isinstance(value, dict)]
    if any("containers" in value.get("spec", {}) for value in groups if isinstance(value.get("spec", {}), dict)):
        return {"type": "object", "podTemplate": True}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: schema[key] for key in KEPT if key in schema}
    if "items" in schema:
        kept["items"] = condense(schema["items"], [item for value in values for item in value])
    if isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = condense(schema["additionalProperties"], [v for g in groups for v in g.values()])
    if "properties" in schema:
        kept["properties"] = {
            name: condense(inner, used) if (used := [g[name] for g in groups if name in g]) else True
            for name, inner in sorted(schema["properties"].items())
        }
        kept["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        if schema.get("required"):
            kept["required"] = sorted(schema["required"])
    return kept


def main(arguments: list[str]) -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for argument in arguments:
        project, _, path = argument.partition("=")
        crd = yaml.safe_load(Path(path).read_text())
        group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            api = f"{group}/{version['name']}"
            used = list(manifests(kind, api))
            if used:
                schema = condense(version["schema"]["openAPIV3Schema"], used)
                schema["properties"] |= {"metadata": {"type": "object"}}
                found[f"{api} {kind}"] = {"from": project, "schema": schema}
    OUT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
