#!/usr/bin/env bash
# Everything about CUDA that only a GPU can show, in at most 8 minutes: each step has its own limit and its own log, and
# none stops the others. Results go to the folder $OUT: a log per step, hardware.json (the driver's table, to be kept as
# tests/conformance/cuda_hardware.json), figures.json, summary.json.
#
#     OUT=/tmp/gpu tests/gpu/check.sh            on the machine with the GPU, from the repository's root
#
# PYTHON: the interpreter, which has cuda-bindings, msgspec, numpy and pytest; torch, cupy and tritonclient if possible.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-gpu-check}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
: > "$OUT/steps"

# step NAME SECONDS COMMAND…: "ok", "skipped" (status 77) or "fail", with the time it took.
step() {
    local name=$1 limit=$2 begin status result
    shift 2
    begin=$(date +%s)
    timeout --kill-after=5 "$limit" "$@" > "$OUT/$name.log" 2>&1
    status=$?
    case $status in
        0) result=ok ;;
        77) result=skipped ;;
        *) result=fail ;;
    esac
    echo "$name $result $(($(date +%s) - begin)) $status" | tee -a "$OUT/steps"
}

environment() {
    nvidia-smi || true
    "$PYTHON" -c 'from shm.cuda import driver; status = driver.probe(); print(status); raise SystemExit(status.kind != "ok")'
}
table() {
    "$PYTHON" -m tests.gpu.table "$OUT/hardware.json"
}
export -f environment table
export OUT PYTHON

step environment 30 bash -c environment
step table 120 bash -c table
step tests 120 "$PYTHON" -m pytest -q --cuda=real -p no:cacheprovider tests/integration/test_cuda_driver.py \
    tests/integration/test_cuda_regions.py tests/integration/test_cuda_client.py
step worker 60 "$PYTHON" -m pytest -q --cuda=real -p no:cacheprovider tests/integration/test_cuda_worker.py \
    tests/integration/test_cuda_staging.py tests/integration/test_cuda_worker_faults.py
step tritonclient 40 "$PYTHON" -m pytest -q --cuda=real -p no:cacheprovider tests/integration/test_cuda_tritonclient.py
step arrays 60 "$PYTHON" -m tests.gpu.arrays
step figures 50 "$PYTHON" -m tests.gpu.figures "$OUT/figures.json"

"$PYTHON" - "$OUT" <<'END'
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
rows = [line.split() for line in (out / "steps").read_text().splitlines()]
summary = {name: {"result": result, "seconds": int(seconds), "status": int(status)} for name, result, seconds, status in rows}
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
END
! grep -q " fail " "$OUT/steps"
