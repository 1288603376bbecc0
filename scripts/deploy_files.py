"""Write the deployment files that are made from others; run `python scripts/deploy_files.py`.

deploy/kubernetes/components/monitoring/rules.yaml        the alerts of deploy/prometheus/alerts.yml as a PrometheusRule
deploy/kubernetes/components/monitoring/dashboards.yaml   those of deploy/grafana, as Grafana's sidecar finds them
"""

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "deploy" / "kubernetes" / "components" / "monitoring"
RULES = MONITORING / "rules.yaml"
DASHBOARDS = MONITORING / "dashboards.yaml"


def rules() -> str:
    """The alerts as an object of the Prometheus operator."""
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "opd", "labels": {"release": "kube-prometheus-stack"}},
        "spec": groups,
    }
    head = "# Made from deploy/prometheus/alerts.yml by scripts/deploy_files.py; do not edit.\n"
    return head + str(yaml.safe_dump(rule, sort_keys=False, width=200))


def dashboards() -> str:
    """The dashboards as a ConfigMap with the label by which the sidecar of Grafana's charts finds them."""
    files = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    held = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "opd-dashboards", "labels": {"grafana_dashboard": "1"}},
        # Compact: a ConfigMap may have 1 MiB, and the file is not for reading.
        "data": {f"opd-{file.name}": json.dumps(json.loads(file.read_text())) for file in files},
    }
    head = "# Made from deploy/grafana by scripts/deploy_files.py; do not edit.\n"
    return head + str(yaml.safe_dump(held, sort_keys=False, width=200))


if __name__ == "__main__":
    RULES.write_text(rules())
    DASHBOARDS.write_text(dashboards())
