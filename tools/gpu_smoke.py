"""Short runs on one and two GPUs that must agree: ``gpu_smoke.py OUT.json [RUN ...] [KEY=VALUE ...]``.

The same 20 steps of quickstart's model in float32: one GPU; two GPUs by csbp, context and block, or sharing heads
(tp); csbp and tp with compiled layers and selective checkpointing; csbp with bfloat16 compute beside one GPU with it,
and a deterministic run twice, which must be the same to the last bit. Prints and records the largest relative
difference of losses and gradient norms from the one-GPU run. Several go at a time. With RUN, a part of a run's name,
only such runs and those that they are compared with are made; in OUT.json they take the place of older ones of that
name.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from csbp.observe.metrics import METRICS, read_records

DETERMINISTIC = ["parallel.nproc=2", "train.dtype=bfloat16", "train.deterministic=true"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "one": ("one", ["parallel.nproc=1"]),
    "csbp": ("one", ["parallel.nproc=2"]),
    "csbp, compiled, attention kept": ("one", ["parallel.nproc=2", "parallel.compile=true",
                                               "parallel.checkpointing=attention"]),
    "csbp, all gathered": ("one", ["parallel.nproc=2", "parallel.exchange=all_gather"]),
    "context": ("one", ["parallel.nproc=2", "parallel.kind=context"]),
    "block": ("one", ["parallel.nproc=2", "parallel.kind=block"]),
    "data": ("one", ["parallel.nproc=2", "parallel.kind=data", "train.packs_per_step=2"]),
    "tp": ("one", ["parallel.nproc=2", "parallel.tp=2"]),
    "tp, compiled, attention kept": ("one", ["parallel.nproc=2", "parallel.tp=2", "parallel.compile=true",
                                             "parallel.checkpointing=attention"]),
    "CPU": ("one", ["parallel.nproc=2", "parallel.device=cpu"]),
    "one, bfloat16": ("one, bfloat16", ["parallel.nproc=1", "train.dtype=bfloat16"]),
    "csbp, bfloat16, compiled": ("one, bfloat16", ["parallel.nproc=2", "train.dtype=bfloat16",
                                                   "parallel.compile=true"]),
    "deterministic": ("deterministic", DETERMINISTIC),
    "deterministic, again": ("deterministic", DETERMINISTIC),
}
COMMON = ["experiment=quickstart", "parallel.device=cuda", "train.steps=20", "train.eval_every=0",
          "train.sample_every=0", "train.packs_per_step=2", "checkpoint.export=false", "checkpoint.every=0",
          "observe.plot=false", "observe.progress=lines"]
AT_ONCE = 5  # of these small runs; none is timed
EXACT = ["attention.backend=reference"]  # float32 throughout


def run(words: list[str], folder: Path) -> dict[str, Any]:
    """One training run: its losses and gradient norms, or its error; and its seconds."""
    kernels = [] if "train.dtype=bfloat16" in words else EXACT
    command = [sys.executable, "-m", "csbp.cli", "train", *COMMON, *kernels, *words, f"run_dir={folder}"]
    started = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        error = (done.stdout + done.stderr)[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        error = str(late)
    seconds = {"seconds": round(time.time() - started)}
    if error:
        return {"error": error} | seconds
    rows = read_records(folder / METRICS)
    return {"losses": [r["loss"] for r in rows], "grad_norms": [r["grad_norm"] for r in rows]} | seconds


def compared(name: str, found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The row of a run beside that which it is compared with."""
    row = {"name": name, "compared_with": RUNS[name][0], "settings": RUNS[name][1], "date": time.strftime("%Y-%m-%d"),
           "seconds": found["seconds"]}
    if "error" in found or "error" in base:
        return row | {"error": found.get("error", "what it is compared with has failed")}
    return row | {"loss_difference": apart(found["losses"], base["losses"]),
                  "grad_norm_difference": apart(found["grad_norms"], base["grad_norms"]),
                  "last_loss": found["losses"][-1]}


def apart(a: list[float], b: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def main(out: Path, words: list[str]) -> int:
    """Run all, compare, record."""
    wanted = [word for word in words if "=" not in word]
    words = [word for word in words if "=" in word]
    names = [name for name in RUNS if not wanted or any(word in name for word in wanted)]
    chosen = [name for name in RUNS if name in names or name in {RUNS[other][0] for other in names}]
    older = json.loads(out.read_text())["runs"] if out.exists() else []
    rows = [row for row in older if row["name"] in RUNS and row["name"] not in chosen]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {name: pool.submit(run, [*words, *RUNS[name][1]], Path(scratch) / str(i))
                for i, name in enumerate(chosen)}
        for name in chosen:
            rows.append(compared(name, runs[name].result(), runs[RUNS[name][0]].result()))
            print(json.dumps(rows[-1]), flush=True)
            record(out, rows)
    return int(any("error" in row or row["name"].endswith("again")
                   and row["loss_difference"] + row["grad_norm_difference"] for row in rows))


def record(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write what there is so far."""
    import torch
    import transformers

    found = {"command": "python tools/gpu_smoke.py", "date": time.strftime("%Y-%m-%d"),
              "device": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(),
              "versions": {"python": platform.python_version(), "torch": torch.__version__,
                           "transformers": transformers.__version__}, "runs": rows}
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
