"""Write the deployment files that are made from others; run `python scripts/deploy_files.py`.

deploy/kubernetes/components/monitoring/rules.yaml   the alerts of deploy/prometheus/alerts.yml as a PrometheusRule
"""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "rules.yaml"


def rules() -> str:
    """The alerts as an object of the Prometheus operator."""
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "opd"},
        "spec": groups,
    }
    head = "# Made from deploy/prometheus/alerts.yml by scripts/deploy_files.py; do not edit.\n"
    return head + str(yaml.safe_dump(rule, sort_keys=False, width=200))


if __name__ == "__main__":
    RULES.write_text(rules())
