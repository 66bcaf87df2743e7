#!/usr/bin/env bash
# Fail where a cache format breaks this model. More options of `kvq eval` may follow the model.
#
#     examples/eval_in_ci/check.sh MODEL [OPTION...]
#
# Exit status: 0 the formats are fine, 1 one of them is broken, 2 it could not be measured.
# Leaves the report, its plots and results.json in ./kvq-eval for the pipeline to keep.
set -euo pipefail
model=$1
shift
exec "${PYTHON:-python}" -m kvq_vllm.cli eval "$model" --quick --out kvq-eval --fail-on broken "$@"
