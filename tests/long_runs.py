"""Run the test suites that take hours, in parts of at most two hours, and record the commit and result of each part.

    python -m tests.long_runs torture                # make torture: every part, one after the other
    python -m tests.long_runs torture --part kills   # make torture PART=kills; other arguments go to pytest
    python -m tests.long_runs status                 # the last result of each part, its commit and the commits since

tests/long_runs.csv holds the last result of each part. Commit it together with the change that was tested.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".csv")
LIMIT_MINUTES = 120
SWITCH = {"torture": "MESHBOOK_TORTURE", "parity": "MESHBOOK_ALL_PARITY"}
"""Environment variable that makes the tests of a suite run all their cases."""
GRID, OBJECTIVES = "tests/distributed/test_parity.py", "tests/distributed/test_objective_grid.py"


def _grid(world: int, *models: str) -> list[str]:
    return [f"{GRID}::test_full_grid_matches_one_process[{world}-{model}]" for model in models]


PARTS: dict[str, dict[str, list[str]]] = {
    "torture": {
        "slurm": ["tests/slurm", "--deselect=tests/slurm/test_chaos.py"],
        "slurm_chaos": ["tests/slurm/test_chaos.py"],
        "kubernetes": ["tests/kubernetes", "--deselect=tests/kubernetes/test_image.py"],
        "image": ["tests/kubernetes/test_image.py"],
        "kills": [
            "tests/distributed/test_checkpoint_kills.py",
            *("tests/unit/test_killed_starts.py", "tests/unit/test_tokenize_corpus.py"),
        ],
        "checkpoints": [
            *("tests/distributed/test_checkpoint_crash.py", "tests/distributed/test_checkpoint_async.py"),
            *("tests/distributed/test_checkpoint_damage.py", "tests/distributed/test_checkpoint_disks.py"),
            *("tests/distributed/test_checkpoint_disk_runs.py", "tests/distributed/test_checkpoint_retention.py"),
            "tests/distributed/test_checkpoint_samples.py",
        ],
        "resume": [
            *("tests/distributed/test_checkpoint_exact.py", "tests/distributed/test_checkpoint_resume.py"),
            *("tests/distributed/test_checkpoint_any_mesh.py", "tests/distributed/test_lora_checkpoint.py"),
        ],
        "replicas": [
            *("tests/distributed/test_replica_check.py", "tests/recipes/test_wrong_numbers.py"),
            *("tests/distributed/test_stop_requests.py", "tests/unit/test_masked_output.py"),
        ],
        "damage": [
            *("tests/distributed/test_run_directory_damage.py", "tests/unit/test_run_files.py"),
            "tests/unit/test_damaged_files.py",
        ],
        "wrong_lines": [
            *("tests/config/test_random_wrong_lines.py", "tests/unit/test_no_pickle_is_read.py"),
            "tests/unit/test_models_layers.py",
            "tests/unit/test_models_compile.py",
            *("tests/unit/test_benchmark_gates.py", "tests/unit/test_data_split_files.py"),
        ],
        "recipes": ["tests/recipes", "--deselect=tests/recipes/test_chaos.py"],
        "chaos": ["tests/recipes/test_chaos.py"],
    },
    "parity": {
        "small": [
            *(
                GRID,
                f"--deselect={GRID}::test_full_grid_matches_one_process",
                "tests/distributed/test_parity_planted.py",
            ),
            *("tests/distributed/test_parity_script.py", "tests/distributed/test_parity_smollm2.py"),
            *(
                "tests/distributed/test_packing.py",
                "tests/distributed/test_loss_head_on_meshes.py",
                "tests/distributed/test_preferences.py",
                "tests/distributed/test_muon.py",
                "tests/distributed/test_adamw8bit.py",
                "tests/unit/test_adamw8bit.py",
            ),
            *("tests/distributed/test_expert.py", "tests/distributed/test_router_loss.py"),
            *("tests/distributed/test_pipeline.py", "tests/recipes/test_benchmark_compare.py"),
            *("tests/distributed/test_traffic.py", "tests/unit/test_models_load.py"),
            *("tests/recipes/test_mixture.py", "tests/recipes/test_guard.py"),
        ],
        "adapters": ["tests/distributed/test_lora.py", "tests/distributed/test_lora_experts.py"],
        "preferences": [f"{OBJECTIVES}::test_preference_grid_matches_one_process"],
        "scores": ["tests/distributed/test_classify.py"],
        "tasks": ["tests/distributed/test_tasks.py", "tests/distributed/test_library_tasks.py"],
        "planning": [
            *("tests/distributed/test_simulated_steps.py", "tests/distributed/test_plan_dry_run.py"),
            "tests/distributed/test_memory.py",
        ],
        "distillation": [
            "tests/distributed/test_distillation.py",
            f"{OBJECTIVES}::test_distillation_grid_matches_one_process",
        ],
        "gpu_ready": ["tests/gpu_ready"],
        "oldest": [
            *("tests/gpu_ready", "tests/unit", "tests/config", "tests/distributed", "tests/recipes"),
            "--deselect=tests/recipes/test_chaos.py",
            # These need lm-eval or Optuna, which `make oldest` does not install, or compose QLoRA under FSDP2.
            *("-k", "not (evaluation.tasks or sweep.trials or evaluate_recipe_rejects or documented_commands)"),
        ],
        "families": ["tests/distributed/test_tp_plan.py"],
        "vocabulary": ["tests/distributed/test_odd_vocabulary.py"],
        "grid_2_4": [GRID, "-k", "full_grid and not [8-"],
        "grid_8_llama": _grid(8, "llama", "llama_tied"),
        "grid_8_qwen3": _grid(8, "qwen3", "gpt2", "phi3"),
        "grid_8_gemma": _grid(8, "gemma", "gemma3"),
        "grid_8_mixtral": _grid(8, "mixtral"),
        "grid_8_qwen3_moe": _grid(8, "qwen3_moe"),
    },
}


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one part."""

    suite: str
    part: str
    commit: str
    """Short hash, followed by `+` if tracked files had uncommitted changes."""
    date: str
    minutes: float
    passed: int
    failed: int
    skipped: int
    result: str
    """passed, failed, or over time (stopped after LIMIT_MINUTES)."""


def main() -> int:
    """Run the parts selected on the command line; return 1 if one of them did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("suite", choices=[*PARTS, "status"])
    parser.add_argument("--part", default="", help="run only this part")
    options, arguments = parser.parse_known_args()
    if options.suite == "status":
        return _print_status()
    parts = PARTS[options.suite]
    if options.part and options.part not in parts:
        parser.error(f"--part={options.part}: no such part of {options.suite}; choose one of {', '.join(parts)}")
    results = [_run(options.suite, part, arguments) for part in parts if options.part in ("", part)]
    for result in results:
        print(_describe(result))
    return int(any(result.result != "passed" for result in results))


def _run(suite: str, part: str, arguments: list[str]) -> Result:
    commit, began, oldest = _commit(), time.monotonic(), part == "oldest"
    environ = os.environ | {
        SWITCH[suite]: str(int(not oldest)),  # under the oldest packages: what runs at each commit
        "MESHBOOK_REQUIRE_SLURM": str(int(part.startswith("slurm"))),
        "MESHBOOK_REQUIRE_KUBERNETES": str(int(part == "kubernetes")),
        "OMP_NUM_THREADS": "1",  # the ranks of a test share the cores
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        python = str(Path(sys.prefix, "oldest", "bin", "python")) if oldest else sys.executable
        command = [python, "-m", "pytest", "-s", f"--junitxml={report}", *PARTS[suite][part], *arguments]
        with subprocess.Popen(command, env=environ, cwd=PROJECT) as tests:
            try:
                status, outcome = tests.wait(LIMIT_MINUTES * 60), ""
            except subprocess.TimeoutExpired:
                tests.send_signal(signal.SIGINT)  # pytest then tears down its fixtures and writes the report
                status, outcome = tests.wait(), "over time"
        suites = ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else []
        counts = [
            {name: int(each.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for each in suites
        ]
    failed = sum(each["failures"] + each["errors"] for each in counts)
    skipped = sum(each["skipped"] for each in counts)
    result = Result(
        suite=suite,
        part=part,
        commit=commit,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        minutes=round((time.monotonic() - began) / 60, 1),
        passed=sum(each["tests"] for each in counts) - failed - skipped,
        failed=failed,
        skipped=skipped,
        result=outcome or ("failed" if status else "passed"),
    )
    if not arguments:  # with extra pytest arguments, only a part of the tests may have run
        _record(result)
    return result


def _record(result: Result) -> None:
    kept = [each for each in _recorded() if (each["suite"], each["part"]) != (result.suite, result.part)]
    rows = [*kept, {name: str(value) for name, value in asdict(result).items()}]
    order = [(suite, part) for suite, parts in PARTS.items() for part in parts]
    rows = [row for row in rows if (row["suite"], row["part"]) in order]
    rows.sort(key=lambda row: order.index((row["suite"], row["part"])))
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _recorded() -> list[dict[str, str]]:
    if not RECORD.exists():
        return []
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


def _print_status() -> int:
    rows = {(row["suite"], row["part"]): row for row in _recorded()}
    for suite, parts in PARTS.items():
        for part in parts:
            row = rows.get((suite, part))
            if row is None:
                print(f"{suite} {part}: never run")
                continue
            commit = row["commit"].removesuffix("+")
            later = _git(
                "log", "--oneline", f"{commit}..HEAD", "--", "components", "recipes", "conf", "scripts", "tests"
            )
            print(_describe(Result(**row)) + f"; {len(later.splitlines())} commits since")  # type: ignore[arg-type]
    return 0


def _describe(result: Result) -> str:
    return (
        f"{result.suite} {result.part}: {result.result} on {result.commit} ({result.date}, {result.minutes} min): "
        f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
    )


def _commit() -> str:
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD.relative_to(PROJECT)}")
    return _git("rev-parse", "--short", "HEAD").strip() + ("+" if changed.strip() else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PROJECT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
