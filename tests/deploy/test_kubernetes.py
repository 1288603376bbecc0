"""The Kubernetes overlays: rendered, strictly validated, and held to the policies that they promise."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from opd.config import parse_settings
from opd.fleet.membership.discovery import parse_endpoints
from student.settings.recipe import Recipe
from teacher_server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
CUSTOM = {"cert-manager.io", "monitoring.coreos.com", "keda.sh", "leaderworkerset.x-k8s.io", "jobset.x-k8s.io"}
CUSTOM_SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
"""Made from the projects' definitions by scripts/crd_schemas.py."""
Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def documents(text: str) -> Iterator[Any]:
    """By libyaml where there is one: all that is written here is read whenever the tests are collected."""
    return yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(documents(done.stdout))


def written() -> Iterator[tuple[str, Manifest]]:
    """Every manifest as it stands in the tree, before kustomize."""
    for path in sorted(FOLDER.rglob("*.yaml")):
        for manifest in documents(path.read_text()):
            if isinstance(manifest, dict) and "apiVersion" in manifest and "kustomize" not in manifest["apiVersion"]:
                yield f"{path.relative_to(FOLDER)}:{manifest['kind']}", manifest


def pods(manifest: Manifest) -> list[Manifest]:
    """Every pod specification in a manifest, of whatever kind."""
    found = []
    stack: list[Any] = [manifest]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "containers" in node:
                found.append(node)
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return found


def assert_valid(manifest: Manifest) -> None:
    """As a server with strict field validation would: unknown fields, wrong types and missing fields are errors."""
    validate = pytest.importorskip("kubernetes_validate")
    version = validate.latest_version().rpartition(".")[0]
    if manifest["apiVersion"].partition("/")[0] not in CUSTOM:
        validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, CUSTOM_SCHEMAS[f"{manifest['apiVersion']} {manifest['kind']}"]["schema"])
    for template in pod_templates(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template.get("metadata", {})}}
        validate.validate({**pod, "spec": template["spec"]}, version, strict=True)


def pod_templates(node: Any) -> Iterator[Manifest]:
    """Every template of a pod within a custom resource."""
    if isinstance(node, dict):
        if isinstance(node.get("spec"), dict) and "containers" in node["spec"]:
            yield node
        for value in node.values():
            yield from pod_templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_templates(value)


def assert_restricted(pod: Manifest) -> None:
    """The "restricted" level of Kubernetes' pod security standards, and a root file system that is read-only."""
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
    assert all("hostPath" not in volume for volume in pod["volumes"])


@pytest.mark.parametrize("manifest", [m for _, m in written()], ids=[name for name, _ in written()])
def test_a_manifest_is_valid_and_its_pods_are_restricted(manifest: Manifest) -> None:
    assert_valid(manifest)
    for pod in pods(manifest):
        assert_restricted(pod)


def test_an_image_has_a_tag() -> None:
    """Without one it is `latest`: pulled anew each time, so a run could go on with other code than it began with."""
    images = [c["image"] for _, manifest in written() for pod in pods(manifest) for c in pod["containers"]]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {image.partition(":")[2] for image in images} == {"transformers", "vllm", version}


def test_a_probe_waits_longer_for_a_busy_server_than_the_default_second() -> None:
    texts = "".join(path.read_text() for path in FOLDER.rglob("*.yaml"))
    probes = re.findall(r"(?:startup|readiness|liveness)Probe\b.*", texts)
    assert len(probes) == 11 and all("timeoutSeconds: 5" in probe for probe in probes)


def test_a_rollout_is_given_the_time_that_a_model_may_take_to_load() -> None:
    deployments = [manifest for _, manifest in written() if manifest["kind"] == "Deployment"]
    assert len(deployments) == 2
    for deployment in deployments:
        probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        assert deployment["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_every_kind_of_custom_resource_has_its_schema_and_mistakes_are_found() -> None:
    custom = {f"{m['apiVersion']} {m['kind']}": m for _, m in written() if m["apiVersion"].partition("/")[0] in CUSTOM}
    assert custom.keys() == CUSTOM_SCHEMAS.keys() and len(custom) == 8
    for name, manifest in custom.items():
        for mistake in ({"spec": {**manifest["spec"], "replica": 2}}, {"spec": []}):
            with pytest.raises(jsonschema.ValidationError):
                assert_valid({**manifest, **mistake})
        assert not name.startswith("leaderworkerset") or len(list(pod_templates(manifest))) == 2
    group = next(manifest for name, manifest in custom.items() if name.startswith("leaderworkerset"))
    for within, wrong in (
        (("leaderWorkerTemplate", "restartPolicy"), "Never"),
        (("leaderWorkerTemplate", "size"), "2"),
    ):
        broken = json.loads(json.dumps(group))
        broken["spec"][within[0]][within[1]] = wrong
        with pytest.raises(jsonschema.ValidationError):
            assert_valid(broken)


def unchecked(schema: Any, value: Any, at: str) -> Iterator[str]:
    """The places of a manifest for which the condensed schema says nothing."""
    if schema is True:
        yield at
    elif isinstance(value, dict) and "properties" in schema:
        for name in value.keys() & schema["properties"].keys():
            yield from unchecked(schema["properties"][name], value[name], f"{at}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from unchecked(schema["items"], item, at)


def test_no_field_of_a_custom_resource_is_left_unchecked() -> None:
    """A field that was added after the schemas were made is `true` in them, and takes anything."""
    for name, manifest in written():
        if manifest["apiVersion"].partition("/")[0] in CUSTOM:
            schema = CUSTOM_SCHEMAS[f"{manifest['apiVersion']} {manifest['kind']}"]["schema"]
            assert not list(unchecked(schema, manifest, name)), "run scripts/crd_schemas.py"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_renders_to_valid_manifests_in_one_namespace(overlay: str) -> None:
    manifests = rendered(overlay)
    assert [pod for m in manifests for pod in pods(m)]
    for manifest in manifests:
        assert_valid(manifest)
        for pod in pods(manifest):
            assert_restricted(pod)
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "opd"
        else:
            assert manifest["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@needs_kubectl
def test_the_job_that_loads_models_fits_an_overlay_and_writes_to_the_claim_that_others_read(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "k")
    with (tmp_path / "k" / "overlays" / "small" / "kustomization.yaml").open("a") as file:
        file.write("components: [../../components/load-models]\n")
    command = ["kubectl", "kustomize", str(tmp_path / "k" / "overlays" / "small")]
    made = list(documents(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    (job,) = (m for m in made if m["metadata"]["name"] == "load-models" and m["kind"] == "Job")
    assert job["metadata"]["namespace"] == "opd" and ("ServiceAccount", "opd") in [
        (m["kind"], m["metadata"]["name"]) for m in made
    ]
    (pod,) = pods(job)
    volumes = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    assert volumes["models"] == {"claimName": "models"}, "not read-only"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_an_overlay_names_is_there(overlay: str) -> None:
    manifests = rendered(overlay)
    have = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    secrets = {m["spec"]["secretName"] for m in manifests if m["kind"] == "Certificate"}
    for pod in (pod for m in manifests for pod in pods(m)):
        assert ("ServiceAccount", pod["serviceAccountName"]) in have
        names = {volume["name"] for volume in pod["volumes"]}
        assert all(mount["name"] in names for c in pod["containers"] for mount in c["volumeMounts"])
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in have
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in have
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_settings_in_an_overlay_are_settings_of_opd(overlay: str) -> None:
    maps = [m for m in rendered(overlay) if m["kind"] == "ConfigMap"]
    maps = [m for m in maps if "grafana_dashboard" not in m["metadata"].get("labels", {})]
    assert {name for m in maps for name in m["data"]} == {"server.yaml", "recipe.yaml", "start.sh"}
    services = {m["metadata"]["name"] for m in rendered(overlay) if m["kind"] == "Service"}
    for data in (m["data"] for m in maps):
        if "server.yaml" in data:
            parse_settings(ServerSettings, yaml.safe_load(data["server.yaml"]))
        if "recipe.yaml" in data:
            recipe = parse_settings(Recipe, yaml.safe_load(data["recipe.yaml"]))
            assert recipe.teachers is not None
            endpoints = recipe.teachers.endpoints
            sources = parse_endpoints(endpoints)
            assert {source.text.split(":")[1] for source in sources} <= services
            if isinstance(endpoints, dict):  # teacher to its replicas
                assert endpoints.keys() == {str(teacher) for teacher in recipe.teachers.routes.values()}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_service_or_a_deployment_selects_the_pods_of_one_teacher(overlay: str) -> None:
    manifests = rendered(overlay)
    deployments = [m["spec"] for m in manifests if m["kind"] == "Deployment"]
    selectors = [m["spec"]["selector"] for m in manifests if m["kind"] == "Service"]
    for wanted in selectors + [spec["selector"]["matchLabels"] for spec in deployments]:
        found = [spec for spec in deployments if wanted.items() <= spec["template"]["metadata"]["labels"].items()]
        assert len(found) == 1 or not deployments, wanted


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_is_denied_but_what_is_allowed_by_name(overlay: str) -> None:
    policies = [m["spec"] for m in rendered(overlay) if m["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    for policy in policies:
        assert all(rule.get("from") for rule in policy.get("ingress", ()))
        assert all(rule.get("to") for rule in policy.get("egress", ()))


@needs_kubectl
def test_the_autoscaler_alone_decides_how_many_replicas_run_and_takes_idle_ones_away_late() -> None:
    specs = {m["kind"]: m["spec"] for m in rendered("gpu") if m["kind"] in ("Deployment", "ScaledObject")}
    scaler = specs["ScaledObject"]
    assert "replicas" not in specs["Deployment"], "or every `kubectl apply` would undo its choice"
    assert scaler["minReplicaCount"] == scaler["fallback"]["replicas"] < scaler["maxReplicaCount"]
    down = scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 1800 and "cooldownPeriod" not in scaler
    (trigger,) = scaler["triggers"]
    # KEDA's default, AverageValue: replicas = query / threshold, whatever number runs now.
    assert "metricType" not in trigger
    (scaled,) = (m["metadata"]["namespace"] for m in rendered("gpu") if m["kind"] == "ScaledObject")
    assert set(re.findall(r'namespace="(\w+)"', trigger["metadata"]["query"])) == {scaled}


def test_the_rules_of_the_operator_are_those_of_prometheus() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "deploy_files.py"))
    assert script["RULES"].read_text() == script["rules"](), "run python scripts/deploy_files.py"
    assert script["DASHBOARDS"].read_text() == script["dashboards"](), "run python scripts/deploy_files.py"
    assert len(script["DASHBOARDS"].read_bytes()) < 1 << 20, "the most that a ConfigMap takes"


@pytest.mark.parametrize(("begun", "ranks"), [(False, 1), (True, 1), (False, 2)])
def test_the_start_script_begins_resumes_and_spreads(tmp_path: Path, begun: bool, ranks: int) -> None:
    """The script that the pods run, with `opd` and `torchrun` replaced by programs that print their arguments."""
    recipe = tmp_path / "etc" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text(f"run: {tmp_path / 'run'}\n")
    for name in ("opd", "torchrun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    if begun:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "recipe.yaml").touch()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    script = (FOLDER / "base" / "student" / "start.sh").read_text().replace("/etc/opd", str(recipe.parent))
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "RANKS": str(ranks)},
        capture_output=True,
        text=True,
        check=True,
    )
    *checks, last = done.stdout.splitlines()
    words = last.split()
    assert words[0] == ("torchrun" if ranks > 1 else "opd")
    assert ("--resume" in words) == begun
    # torchrun hides the exit codes by which a mistake is told from an accident: a dry run comes before it.
    arguments = words[words.index("train") :]
    assert checks == [f"opd {' '.join(arguments)} --dry-run"] * (ranks > 1)
    assert str(recipe) in words and not [word for word in words if word.startswith("run=")]


def test_every_teacher_that_is_scraped_is_one_whose_absence_is_told() -> None:
    """The Prometheus operator takes the job from the label `jobLabel` of the service, without it from its name."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    (gone,) = (rule["expr"] for group in rules for rule in group["rules"] if rule["alert"] == "TeacherGone")
    watched = re.findall(r'job=~"([^"]+)"', gone)[0]
    manifests = [manifest for _, manifest in written()]
    (monitor,) = (m["spec"] for m in manifests if m["kind"] == "ServiceMonitor")
    wanted = monitor["selector"]["matchLabels"].items()
    services = [m["metadata"] for m in manifests if m["kind"] == "Service"]
    scraped = [service for service in services if wanted <= service.get("labels", {}).items()]
    assert {service["name"] for service in scraped} == {"teacher", "code"}
    for service in scraped:
        job = service["labels"][monitor["jobLabel"]] if "jobLabel" in monitor else service["name"]
        assert re.fullmatch(watched, job), f"TeacherGone does not watch job {job}"
