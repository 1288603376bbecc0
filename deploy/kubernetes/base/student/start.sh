# Starts the run, or resumes it if it was already started, even before its first checkpoint. RANKS > 1 starts data-parallel ranks.
set -eu
# The run's folder is the recipe's. A recipe that cannot be read is reported by opd below, with its exit code.
RUN=${RUN:-$(python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["run"])' /etc/opd/recipe.yaml 2>/dev/null || true)}
if [ -e "$RUN/recipe.yaml" ]; then set -- --resume; else set --; fi
set -- train /etc/opd/recipe.yaml metrics_port=9401 metrics_host=0.0.0.0 "$@"
if [ "${RANKS:-1}" -gt 1 ] || [ "${NODES:-1}" -gt 1 ]; then
    # torchrun ends with 1 whatever its ranks end with. This dry run finds errors that would occur again, and keeps their exit codes.
    opd "$@" --dry-run
    # Within the pod's terminationGracePeriodSeconds. By default torchrun kills ranks that are still saving after 30 s.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-570}"
    exec torchrun --nproc-per-node "${RANKS:-1}" --nnodes "${NODES:-1}" --node-rank "${JOB_COMPLETION_INDEX:-0}" \
        --master-addr "${MASTER:-localhost}" --master-port 29500 -m opd.cli "$@"
fi
exec opd "$@"
