"""`python recipe.py` in real processes: the ranks it starts, their config and environment, and the files it writes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest
import yaml

from tests.recipes.launching import TWO, Bench, until

pytestmark = pytest.mark.new_interpreter

REPORT = """
note("pid", os.getpid())
note("parent", os.getppid())
note("cfg", json.dumps([cfg.run.dir, cfg.training.max_steps, type(cfg).__name__]))
note("environ", json.dumps(dict(os.environ)))
note("torch", "torch" in sys.modules)
"""

ALL_REDUCE = """
import torch
import torch.distributed as dist

{start}
value = torch.tensor([RANK + 1.0])
dist.all_reduce(value)
inodes = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{{name}}").readlines()[1:]]
note("listens", " ".join(row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{{row[9]}}]" in inodes))
note("sum", value.item())
dist.destroy_process_group()
"""
LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp has it


def test_single_process_run_stays_in_the_started_process(bench: Bench) -> None:
    """A debugger therefore works without further options."""
    bench.write(REPORT)
    started = bench.start("training.max_steps=7")
    done = started.wait()
    assert done.status == 0
    (run,) = bench.run_directories()
    assert bench.notes("pid") == [str(started.process.pid)]
    assert json.loads(bench.notes("cfg")[0]) == [str(run), 7, "FinetuneConfig"]
    environ = json.loads(bench.notes("environ")[0])
    expected = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    expected |= {"MESHBOOK_RUN_DIR": str(run), "MESHBOOK_ATTEMPT": "0"}
    assert {name: environ.get(name) for name in expected} == expected
    assert bench.notes("torch") == ["False"]
    assert done.errors == f"run {run}: 1 process\n"
    frozen = yaml.safe_load((run / "config.yaml").read_text())
    assert frozen["training"]["max_steps"] == 7
    assert frozen["run"]["dir"] == str(run)
    record = json.loads((run / "environment.json").read_text())
    assert (record["recipe"], record["processes"], record["recipe_file"]) == ("finetune", 1, str(bench.recipe))
    assert "training.max_steps=7" in record["command"]


def test_two_processes_are_children_and_get_the_same_config(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the user's value overrides the default
    bench.write(REPORT + 'print("stdout of", RANK)\nprint("stderr of", RANK, file=sys.stderr)')
    started = bench.start(TWO)
    done = started.wait()
    assert done.status == 0
    (run,) = bench.run_directories()
    assert bench.notes("parent") == [str(started.process.pid)] * 2
    assert bench.notes("cfg") == [json.dumps([str(run), 40, "FinetuneConfig"])] * 2
    environs = [json.loads(text) for text in bench.notes("environ")]
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in environs] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    cores = len(os.sched_getaffinity(0))
    assert {each["OMP_NUM_THREADS"] for each in environs} == {str(max(cores // 2, 1))}
    assert done.output == "stdout of 0\n"
    assert "stderr of 0" in done.errors
    assert (run / "logs" / "latest" / "rank_1.log").read_text() == "stdout of 1\nstderr of 1\n"


@pytest.mark.parametrize(
    ("start", "loopback_only"),
    [
        ("from components import distributed\ndistributed.start_process_group('cpu')", True),
        ("dist.init_process_group('gloo')", False),
    ],
    ids=["ours", "plain"],
)
def test_ranks_connect_through_the_store_of_the_launcher(bench: Bench, start: str, loopback_only: bool) -> None:
    """Our start-up listens on loopback only; a recipe that only calls torch.distributed works too."""
    bench.write(ALL_REDUCE.format(start=start))
    bench.complete(TWO)
    assert bench.notes("sum") == ["3.0", "3.0"]
    listening = set(" ".join(bench.notes("listens")).split())
    assert LOOPBACK in listening
    if loopback_only:
        assert listening == {LOOPBACK}


def test_thread_that_uses_the_store_at_exit_does_not_abort_the_rank(bench: Bench) -> None:
    """Exit functions, other threads and unflushed output are handled as in a normal interpreter exit."""
    bench.write("""
        import atexit, threading
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def use_the_store() -> None:
            while True:
                store.set("key", "value")

        threading.Thread(target=use_the_store, daemon=True).start()
        atexit.register(note, "exit_function")
        threading.Thread(target=lambda: (time.sleep(1), note("other_thread"))).start()
        sys.stdout.write("no newline")
    """)
    done = bench.complete(TWO)
    assert done.output == "no newline"
    assert bench.notes("exit_function") == bench.notes("other_thread") == ["", ""]


def test_stale_rank_variables_do_not_leak(bench: Bench) -> None:
    bench.write(REPORT)
    stale = {
        **dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK", "MASTER_PORT"), "77"),
        **dict.fromkeys(("SLURM_LOCALID", "SLURM_NTASKS", "MESHBOOK_STORE_FD"), "77"),
        "SLURM_PROCID": "0",  # as in a batch shell; a task with a higher id would be a rank
        **dict.fromkeys(("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "MESHBOOK_RUN_DIR"), "77"),
    }
    for processes in ("1", "2"):
        bench.complete(f"cluster.procs_per_node={processes}", environment=stale)
        for environ in map(json.loads, bench.notes("environ")):
            assert not {"GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"} & set(environ)
            assert not [name for name in environ if name.startswith("TORCHELASTIC_")]
            assert environ["LOCAL_RANK"] in "01"
            assert environ["MASTER_PORT"] != "77"
            assert environ["MESHBOOK_RUN_DIR"].startswith(str(bench.folder))
            assert environ.get("MESHBOOK_STORE_FD") != "77"


def test_copied_recipe_runs_from_any_folder(bench: Bench, tmp_path: Path) -> None:
    bench.write(REPORT)
    elsewhere, folder = Bench(tmp_path / "my project"), tmp_path / "another folder"
    elsewhere.folder.mkdir()
    folder.mkdir()
    shutil.copy(bench.recipe, elsewhere.recipe)
    elsewhere.complete(TWO, cwd=folder)
    (run,) = (folder / "outputs" / "finetune").glob("*")
    assert json.loads(elsewhere.notes("cfg")[0])[0] == str(run)
    assert sorted(entry.name for entry in folder.iterdir()) == ["outputs"]


@pytest.mark.parametrize(("package", "safe_path"), [(False, ""), (False, "1"), (True, "1")])
def test_second_components_folder_next_to_the_recipe_is_rejected(bench: Bench, package: bool, safe_path: str) -> None:
    """A package is imported in place of Meshbook's, which cannot report it, if its folder is on sys.path."""
    bench.write("note('ran')")
    (bench.folder / "components").mkdir()
    if package:
        (bench.folder / "components" / "__init__.py").touch()
    done = bench.run(environment={"PYTHONSAFEPATH": safe_path})
    assert done.status == 2
    assert len(done.errors.splitlines()) == 1
    assert done.errors.startswith(str(bench.folder / "components"))
    assert not bench.notes("ran")


@pytest.mark.parametrize("private", [True, False])
def test_private_run_has_owner_only_modes_and_others_follow_the_umask(private: bool, bench: Bench) -> None:
    """Files that contain samples, the environment or addresses are private in both cases."""
    bench.write(
        'open(os.path.join(cfg.run.dir, f"by_{RANK}"), "w").close()\nos.makedirs(cfg.run.dir + "/d", exist_ok=True)'
    )
    command = ("sh", "-c", 'umask 000; exec "$0" "$@"', sys.executable)
    bench.complete(TWO, f"run.private={private}", command=command)
    (run,) = bench.run_directories()
    entries = [bench.folder / "outputs", run.parent, run, *run.rglob("*")]
    assert {entry.name for entry in entries} >= {"by_0", "by_1", "d", "rank_1.log", "config.yaml", "environment.json"}
    for entry in entries:
        if not entry.is_symlink():
            always_private = entry.name in (".lock", "rank_0.log", "rank_1.log", "environment.json")
            mode = 0o700 if private else 0o777
            mode = mode if entry.is_dir() else 0o600 if always_private else mode & 0o666
            assert stat.S_IMODE(entry.stat().st_mode) == mode, entry


def test_simultaneous_starts_get_separate_run_directories(bench: Bench) -> None:
    bench.write("note('ran')")
    started = [bench.start() for _ in range(2)]
    assert [each.wait().status for each in started] == [0, 0]
    assert len(bench.run_directories()) == 2


def test_run_directory_in_use_is_rejected(bench: Bench) -> None:
    bench.write("note('up')\nwait_for('go')")
    first = bench.start("run.dir=mine")
    bench.await_notes("up", 1)
    refused = bench.run("run.dir=mine")
    assert (refused.status, refused.output) == (2, "")
    assert re.fullmatch(r"run.dir=.*/mine: is in use by another run; .*\n", refused.errors)
    (bench.folder / "go").touch()
    assert first.wait().status == 0
    bench.complete("run.dir=mine")
    assert sorted(entry.name for entry in (bench.folder / "mine" / "logs").iterdir()) == [
        "attempt_0",
        "attempt_1",
        "latest",
    ]


def test_changed_config_in_an_existing_run_directory_is_rejected_before_start(bench: Bench) -> None:
    bench.write("note('seed', cfg.run.seed)")
    assert bench.run("run.dir=mine", TWO).status == 0
    refused = bench.run("run.dir=mine", "run.seed=1", "data.max_samples=3", TWO)
    assert refused.status == 2
    heading, *problems = refused.errors.splitlines()
    assert heading == "2 problems with this run:"
    assert [line.partition("=")[0] for line in problems] == ["data.max_samples", "run.seed"]
    assert bench.notes("seed") == ["42", "42"]


def test_dry_run_starts_and_writes_nothing(bench: Bench) -> None:
    bench.write("note('ran')")
    done = bench.complete("cluster.dry_run=true", "parallelism=tp2")
    assert "would start 2 x" in done.output
    assert "tp=2" in done.output
    assert os.listdir(bench.folder) == ["tried.py"]


def test_main_without_config_annotation_is_rejected(bench: Bench) -> None:
    bench.write("note('ran')")
    bench.recipe.write_text(bench.recipe.read_text().replace("cfg: FinetuneConfig", "cfg"))
    done = bench.run()
    assert done.status == 2
    assert "main(cfg: FinetuneConfig)" in done.errors
    assert len(done.errors.splitlines()) == 1


def test_rank_zero_keeps_the_terminal(bench: Bench) -> None:
    bench.write("note('tty', (sys.stdout.isatty(), sys.stderr.isatty()))\nprint('to the terminal')")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(bench.recipe), "model=tiny", TWO, f"run.dir={bench.folder}/run"])
    shown = b""
    until(lambda: len(bench.notes("tty")) == 2)
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # Linux raises EIO once the other end of the terminal is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"to the terminal" in shown
    assert bench.notes("tty") == ["(True, True)", "(False, False)"]
