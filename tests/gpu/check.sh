#!/usr/bin/env bash
# Everything about CUDA that only a GPU can show, in at most 8 minutes: each step has its own limit and its own log, and
# none stops the others. Results go to the folder $OUT: a log per step, hardware.json (the driver's table, to be kept as
# tests/conformance/cuda_hardware.json), figures.json, race.json, paths.json, ort.json, kill.json, and summary.json,
# which says of each step ok, fail or skipped, how long it took, and why it was skipped.
#
#     OUT=/tmp/gpu tests/gpu/check.sh                   on the machine with the GPU
#     OUT=/tmp/gpu tests/gpu/check.sh --wheels DIR      the same; what its Python lacks is in DIR
#     OUT=/tmp/gpu tests/gpu/check.sh --simulated       a rehearsal on tests/cusim: nothing in it is of a GPU
#     python -m tests.gpu.packages fetch DIR 3.12       where there is a network: the wheels, 20 MB
#
# PYTHON: the interpreter. torch, cupy, onnxruntime-gpu, onnx and grpcio are used if they are there, never brought.
set -u
cd "$(dirname "$0")/../.."
OUT=$(realpath -m "${OUT:-${TMPDIR:-/tmp}/gpu-check}") # not in the working tree
PYTHON=${PYTHON:-python3}
CUDA=real
PATIENCE=1
mkdir -p "$OUT"
rm -f "$OUT"/*.log "$OUT"/*.json
: > "$OUT/steps"

# step NAME SECONDS COMMAND…: "ok", "skipped" (status 77) or "fail", with the time it took.
step() {
    local name=$1 limit=$(($2 * PATIENCE)) begin status result
    shift 2
    begin=$(date +%s)
    timeout --kill-after=3 "$limit" "$@" > "$OUT/$name.log" 2>&1
    status=$?
    case $status in
        0) result=ok ;;
        77) result=skipped ;;
        *) result=fail ;;
    esac
    echo "$name $result $(($(date +%s) - begin)) $status" | tee -a "$OUT/steps"
}

tests() {
    "$PYTHON" -m pytest -q -p no:cacheprovider --cuda="$CUDA" "${@/#/tests/integration/}"
}
packages() {
    if [ -n "$WHEELS" ]; then
        "$PYTHON" -m tests.gpu.packages install "$WHEELS" "$OUT" || return
        PYTHON=$OUT/venv/bin/python
    fi
    "$PYTHON" -m tests.gpu.packages check
}
simulator() {
    "$PYTHON" -c 'import sys; from pathlib import Path; from tests.cusim.build import build; build(Path(sys.argv[1]))' "$1"
}
environment() {
    nvidia-smi || echo "there is no nvidia-smi"
    "$PYTHON" -c 'from shm.cuda import driver; status = driver.probe(); print(status); raise SystemExit(status.kind != "ok")'
}
export -f tests packages simulator environment

WHEELS=
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) WHEELS=$(realpath "$2"); shift ;;
        --simulated) CUDA=sim PATIENCE=4 ;; # the machine may be a small one
        *) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
    shift
done
export OUT PYTHON CUDA WHEELS

# The limits, with three seconds more for each step that does not end, come to less than 8 minutes.
step packages 15 bash -c packages
[ -z "$WHEELS" ] || PYTHON=$OUT/venv/bin/python
if [ $CUDA = sim ]; then
    mkdir -p "$OUT/cusim"
    step simulator 20 bash -c 'simulator "$OUT/cusim"'
    export GPU_CHECK_LIBRARY="$OUT/cusim/libcuda.so.1" LD_LIBRARY_PATH="$OUT/cusim${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
step environment 15 bash -c environment
step table 45 "$PYTHON" -m tests.gpu.table "$OUT/hardware.json"
step tests 80 bash -c 'tests test_cuda_driver.py test_cuda_regions.py test_cuda_client.py'
step worker 70 bash -c 'tests test_cuda_worker.py test_cuda_staging.py test_cuda_worker_faults.py'
step tritonclient 25 bash -c 'tests test_cuda_tritonclient.py'
step arrays 30 "$PYTHON" -m tests.gpu.arrays
step race 20 "$PYTHON" -m tests.gpu.race "$OUT/race.json"
step figures 15 "$PYTHON" -m tests.gpu.figures "$OUT/figures.json"
step ort 30 "$PYTHON" -m tests.gpu.paths onnx "$OUT/ort.json"
step paths 35 "$PYTHON" -m tests.gpu.paths mover "$OUT/paths.json"
step kill 35 "$PYTHON" -m tests.gpu.kill "$OUT/kill.json"

"$PYTHON" - "$OUT" "$CUDA" <<'END'
import json, pathlib, re, sys

out = pathlib.Path(sys.argv[1])
steps = {}
for line in (out / "steps").read_text().splitlines():
    name, result, seconds, status = line.split()
    steps[name] = {"result": result, "seconds": int(seconds), "status": int(status)}
    if result == "skipped":
        said = re.findall("^SKIPPED: (.*)", (out / f"{name}.log").read_text(), re.MULTILINE)
        steps[name]["why"] = said[-1] if said else "see its log"
        print(f"{name} was skipped: {steps[name]['why']}")
summary = {"simulated": sys.argv[2] == "sim", "steps": steps}
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
END
! grep -q " fail " "$OUT/steps"
