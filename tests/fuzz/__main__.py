"""Train random valid configurations with the recipes and compare each with plain transformers.

    python -m tests.fuzz --seed 7 --cases 300        # make fuzz SEED=7 CASES=300
    python -m tests.fuzz --seed 7 --case 12          # repeat one case and keep its folder

Writes outputs/fuzz/SEED.jsonl, one line per finished case; started again, it continues after the last one.
Exits 1 if a case differs from its reference, crashes or hangs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from tests.fuzz.cases import draw_case
from tests.fuzz.compare import Finding, run_case

OUTPUTS = Path(__file__).resolve().parents[2] / "outputs" / "fuzz"


def main() -> int:
    """Run the cases that are not recorded yet, and print a line per case and a summary."""
    parser = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases")
    parser.add_argument("--cases", type=int, default=300, help="number of cases (default: 300)")
    parser.add_argument("--case", type=int, help="run only this case and keep its folder")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after this many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent cases (default: 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.case is not None:
        folder = OUTPUTS / f"{arguments.seed}_{arguments.case}"
        finding = run_case(draw_case(arguments.seed, arguments.case), folder)
        print(f"{finding}\nkept: {folder}")
        return int(finding.is_failure)
    record = OUTPUTS / f"{arguments.seed}.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    findings = _recorded(record)
    remaining = [index for index in range(arguments.cases) if f"{arguments.seed}/{index}" not in findings]
    deadline = time.monotonic() + 60 * arguments.minutes
    with ThreadPoolExecutor(arguments.jobs) as pool, record.open("a") as lines:
        runs = [pool.submit(_run_until, deadline, arguments.seed, index) for index in remaining]
        for run in as_completed(runs):
            finding = run.result()
            if finding is not None:
                findings[finding.name] = finding
                lines.write(json.dumps(asdict(finding)) + "\n")
                lines.flush()
                print(finding, flush=True)
    return _summarize(findings.values(), arguments.cases)


def _run_until(deadline: float, seed: int, index: int) -> Finding | None:
    if time.monotonic() > deadline:
        return None
    case = draw_case(seed, index)
    with tempfile.TemporaryDirectory(prefix="meshbook-fuzz-") as folder:
        try:
            return run_case(case, Path(folder))
        except Exception:  # in the reference or the comparison: record it and continue
            return Finding(case.name, "reference failed", traceback.format_exc(), [case.family])


def _recorded(record: Path) -> dict[str, Finding]:
    lines = record.read_text().splitlines() if record.exists() else []
    return {finding.name: finding for finding in (Finding(**json.loads(line)) for line in lines)}


def _summarize(findings: Iterable[Finding], cases: int) -> int:
    findings = list(findings)
    outcomes = Counter(finding.outcome for finding in findings)
    print(f"\n{len(findings)} of {cases} cases: " + ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()))
    equal = [finding for finding in findings if finding.outcome == "equal"]
    for name in ("loss", "norm", "eval_loss", "weights"):
        if equal:
            worst = max(equal, key=lambda finding: finding.differences[name])
            print(f"worst relative difference of {name}: {worst.differences[name]:.1e} ({worst.name})")
    for reason, count in Counter(
        f.detail.splitlines()[-1][:110] for f in findings if f.outcome == "rejected"
    ).most_common():
        print(f"rejected {count} x: {reason}")
    failures = [finding for finding in findings if finding.is_failure]
    for finding in failures:
        seed, _, index = finding.name.partition("/")
        print(f"WRONG {finding}\n  repeat: make fuzz SEED={seed} CASE={index}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
