"""Hold a finished quickstart run against what the README says of it: ``check_quickstart.py RUN_DIR``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from csbp.observe.metrics import METRICS, read_records


def problems(run_dir: Path) -> list[str]:
    """What is not as claimed; empty when all is."""
    summary = json.loads((run_dir / "summary.json").read_text())
    after = summary["eval_loss_after"]
    found = [f"held-out loss after {after:.3f} does not beat {name} {summary[key]:.3f}"
             for name, key in (("before", "eval_loss_before"), ("the unigram model", "eval_loss_unigram"),
                               ("a random start", "eval_loss_random_start")) if not after < summary[key]]
    if not summary["masked_accuracy_after"] > summary["masked_accuracy_before"]:
        found.append("masked-token accuracy did not rise")
    steps = [record["step"] for record in read_records(run_dir / METRICS)]
    if steps != list(range(1, len(steps) + 1)) or len(steps) != summary["steps"]:
        found.append(f"metrics.jsonl holds steps {steps[:3]}...{steps[-3:]}")
    for name in ("config.yaml", "loss.png", "export/config.json", "export/model.safetensors", "export/tokenizer.json"):
        if not (run_dir / name).exists():
            found.append(f"{name} is missing")
    if not any((run_dir / "checkpoints").glob("step-*")):
        found.append("there is no checkpoint")
    return found


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    print("\n".join(wrong) or "quickstart: every claim holds")
    sys.exit(bool(wrong))
