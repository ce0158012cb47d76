"""The batch script: its text for four clusters, checked by bash and shellcheck."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from components.config.schema.cluster import ClusterConfig, Device, SlurmClusterConfig
from components.config.schema.schedulers import (
    NAMED_ELSEWHERE,
    NOT_A_SUBMISSION,
    SCRIPT_VARIABLES,
    ContainerConfig,
    ContainerRuntime,
    GpuRequest,
    Launcher,
    RequeueConfig,
    seconds_of,
)
from components.launch.job import scheduler
from components.launch.slurm.script import (
    TEMPLATE,
    BatchScript,
    _as_line,
    _as_word,
    _container_arguments,
    _job_options,
    as_argument,
    render_script,
    resource_options,
    setup_problems,
)
from components.protocol.errors import ConfigError

GOLDEN = Path(__file__).with_name("golden")
"""Expected scripts. After an intended change: MESHBOOK_WRITE_GOLDEN=1 python -m pytest THIS_FILE, then review them."""
SHARED = Path("/shared/it's mine")
SLURM = {"procs_per_node": "8", "python": "/shared/venv/bin/python"}
CLUSTERS = {
    "srun": SlurmClusterConfig(
        **SLURM, nodes="4", partition="gpu", account="my_group", qos="long", time="1-12:00:00", mem="0", exclusive=True,
        constraint="a100&nvlink", exclude="n[3,7]", reservation="week", cpus_per_proc=12, gpu_request=GpuRequest.gres,
        setup=["module load cuda/12.8", "export PATH=/opt/tool/bin:$PATH"], network_env={"NCCL_SOCKET_IFNAME": "ib0"},
        env={"MESSAGE": "it's\n$(date)", "NCCL_DEBUG": "INFO"}, requeue=RequeueConfig(max=3, node_failure=False),
        sbatch_extra={"mail-type": "FAIL", "comment": 'two "words" # \\', "spread-job": ""},
        srun_extra=["--cpu-bind=cores", "--label"],
    ),
    "torchrun": SlurmClusterConfig(
        **SLURM, nodes="2-4", launcher=Launcher.torchrun, cpus_per_proc=4, signal_lead_seconds=60, health_check=False,
    ),
    "pyxis": SlurmClusterConfig(
        **SLURM, container=ContainerConfig(
            runtime=ContainerRuntime.pyxis, image="nvcr.io#nvidia/pytorch:25.06-py3",
            mounts=["/data", "/scratch:/tmp"], args=["--no-container-mount-home"],
        ),
    ),
    "apptainer": SlurmClusterConfig(
        **SLURM, container=ContainerConfig(
            runtime=ContainerRuntime.apptainer, image="/shared/my image.sif", mounts=["/data"], args=["--nv"],
        ),
    ),
}  # fmt: skip


def script(cluster: ClusterConfig) -> str:
    run_dir = SHARED / "runs" / "20260101-000000-abcd"
    code = run_dir / "code"
    counts = [cluster.fewest_nodes, cluster.most_nodes] if "-" in cluster.nodes else [cluster.most_nodes]
    places = {"run_dir": run_dir, "code": code, "recipe": code / "recipes" / "finetune.py", "folder": SHARED}
    return render_script(BatchScript(cluster=cluster, node_counts=counts, name="a run: $(date)", attempt=2, **places))


@pytest.mark.parametrize("name", CLUSTERS)
def test_rendered_script_matches_the_golden_file(name: str) -> None:
    rendered, golden = script(CLUSTERS[name]), GOLDEN / f"{name}.sbatch"
    if os.environ.get("MESHBOOK_WRITE_GOLDEN") == "1":
        golden.write_text(rendered)
    assert rendered == golden.read_text()


@pytest.mark.parametrize("name", CLUSTERS)
def test_bash_and_shellcheck_accept_the_script(name: str) -> None:
    file = str(GOLDEN / f"{name}.sbatch")
    subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(["shellcheck", "--norc", file], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_every_variable_of_the_script_is_reserved() -> None:
    """cluster.env must not set the variables that the template itself sets."""
    lines = "\n".join(file.read_text() for file in GOLDEN.glob("*.sbatch"))
    body = re.sub(r"^(#|export (MESSAGE|NCCL_\w+|PATH)=).*$", "", lines, flags=re.MULTILINE)
    assigned = set(re.findall(r"(?:^|[ ;])([A-Za-z_]\w*)=(?![-\w]*[,\"])", body, re.MULTILINE))
    # For these, values of cluster.env take precedence over the template.
    overridable = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONPATH", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"}
    assert assigned - overridable - {"recipe", "JobId", "Requeue", "ExcNodeList", "disable"} <= SCRIPT_VARIABLES
    assert {"run_dir", "status", "MASTER_PORT"} <= assigned


@pytest.mark.parametrize(
    "text",
    [
        *("", "plain", "two words", "it's", '"', "$(date)", "a\nb", "a\r\nb", "\x01\x7f\\'", "Grüße\n"),
        *("\u2028 \u00a0", "!", "-"),
    ],
)
def test_bash_word_is_one_line_and_round_trips(text: str) -> None:
    word = _as_word(text)
    assert word.isprintable()
    for locale in ("C", "C.UTF-8"):
        printed = subprocess.check_output(["bash", "-c", f"printf %s {word}"], env={"LC_ALL": locale})
        assert printed == text.encode()


@pytest.mark.parametrize(
    ("policy", "flag", "updates"),
    [
        (RequeueConfig(), "--requeue", []),
        (RequeueConfig(node_failure=False), "--no-requeue", ["Requeue=0", "Requeue=1"]),
    ],
)
def test_node_failure_policy_sets_requeue_flag(policy: RequeueConfig, flag: str, updates: list[str]) -> None:
    """A --no-requeue job must be updated to Requeue=1 once the ranks have saved, or it could not be requeued.

    The requeued job must reset it, or Slurm would requeue it when a node fails.
    """
    rendered = script(SlurmClusterConfig(**SLURM, requeue=policy))
    assert re.findall(r"^#SBATCH (--(?:no-)?requeue)$", rendered, re.MULTILINE) == [flag]
    assert re.findall(r"^ *scontrol update .*(Requeue=\d)", rendered, re.MULTILINE) == updates
    assert ("Requeue=0" in rendered.partition("while true")[0]) == bool(updates)


@pytest.mark.parametrize(("marker", "update"), [("", None), ("n2\nn7\n", "update JobId=7 ExcNodeList=n2,n7")])
def test_requeued_job_excludes_the_nodes_of_the_marker(tmp_path: Path, marker: str, update: str | None) -> None:
    """`conclude` decides which ones; see test_job_conclude.py."""
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >> asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "requeue").write_text(marker)
    _, found, requeue = script(SlurmClusterConfig(**SLURM)).partition('if [ -e "$run_dir/requeue" ] && [ -z')
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "run_dir": str(tmp_path), "cancelled": "", "SLURM_JOB_ID": "7"}
    command = ["bash", "-uo", "pipefail", "-c", found + requeue]
    subprocess.run(command, env=environ, cwd=tmp_path, check=True)
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 7", *([update] if update else [])]


def test_node_check_counts_gpus_unless_the_run_uses_none() -> None:
    for device, gpus in ((Device.auto, 8), (Device.cuda, 8), (Device.cpu, 0)):
        assert f'check "$run_dir" {gpus}\n' in script(SlurmClusterConfig(**SLURM, device=device))


def test_code_without_snapshot_is_mounted() -> None:
    container = ContainerConfig(runtime=ContainerRuntime.apptainer, image="x.sif")
    job = BatchScript(
        SlurmClusterConfig(procs_per_node="1", container=container, snapshot=False),
        [1],
        *("name", Path("/run"), 0, Path("/code"), Path("/mine/recipe.py"), Path("/folder")),
    )
    assert "--bind=/run --bind=/code --bind=/mine --bind=/folder --pwd=/folder x.sif python)" in render_script(job)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ nothing }}", "cannot be rendered: 'nothing' is undefined"),
        ("#!/bin/bash\n{% if %}", "cannot be rendered, line 2: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered: access to attribute '__class__'"),
        ("{{ cluster.__init__.__globals__['re'] }}", "cannot be rendered: access to attribute '__init__'"),
        ("{% for i in range(10**9) %}{% endfor %}", "cannot be rendered: Range too big"),
        ("{{ 1 / 0 }}", "cannot be rendered: division by zero"),
        ("if true\n", "bash cannot parse it: line 2: syntax error: unexpected end of file"),
        (b"\xff", "cannot be rendered: 'utf-8' codec"),
        (None, "cannot be rendered: [Errno 2] No such file"),
        ("fifo", "cannot be rendered: [Errno 22] Not a regular file"),
        (bytes(2**20 + 1), "cannot be rendered: [Errno 27] Larger than 1,048,576 bytes"),
        ("{{ 'a' * 10**10 }}", "cannot be rendered: it takes more than 512 MiB of memory"),
        ("{{ 'a' * 10**7 }}", "cannot be rendered: it renders to more than 1,048,576 characters"),
        ("{{ 9 ** (9 ** 9) }}", "cannot be rendered: it takes more than 1 s of CPU time"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot be rendered: maximum recursion depth"),
    ],
)
def test_invalid_custom_template_is_rejected(
    tmp_path: Path, text: str | bytes | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_CPU_SECONDS", 1)
    file = tmp_path / "mine.j2"
    if text == "fifo":
        os.mkfifo(file)
    elif text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        script(SlurmClusterConfig(**SLURM, template=str(file)))
    (problem,) = caught.value.problems
    assert problem.startswith(f"cluster.template={file}: ")
    assert message in problem


def test_custom_template_gets_every_variable_listed_in_the_guide(tmp_path: Path) -> None:
    guide = (TEMPLATE.parent / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", guide.partition("cluster.template")[2], re.MULTILINE)
    assert len(listed) == 13
    file = tmp_path / "mine.j2"
    file.write_text("".join(f"# {{{{ {name} }}}}\n" for name in listed))
    assert script(SlurmClusterConfig(**SLURM, template=str(file))).count("\n# ") == 12


def test_setup_lines_that_bash_cannot_parse_are_rejected() -> None:
    good = ["module load cuda/12.8", ". ~/env.sh", "# a remark", "", "export A='b c' B=\"$(date)\"", "a && b; c | d &"]
    bad = ["echo '", "cat <<end", "echo \\", "then", "}; {", "f() {"]
    problems = setup_problems(SlurmClusterConfig(**SLURM, setup=[*good, *bad]))
    found = [problem.partition(": bash cannot")[0] for problem in problems]
    assert found == [f"cluster.setup={line!r}" for line in bad]


def cluster(**values: object) -> ClusterConfig:
    return SlurmClusterConfig(**{"procs_per_node": "4", **values})


def requested(**values: object) -> list[str]:
    return [as_argument(option) for option in resource_options(cluster(**values))]


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4"]),
        ({"nodes": "4-8"}, ["--nodes=4-8", "--mincpus=4", "--gpus-per-node=4"]),
        ({"nodes": "4-8", "cpus_per_proc": 6, "device": Device.cpu},
         ["--nodes=4-8", "--mincpus=24", "--cpus-per-task=6"]),
        ({"gpu_request": GpuRequest.gres}, ["--nodes=1", "--ntasks-per-node=4", "--gres=gpu:4"]),
        ({"gpu_request": GpuRequest.gpus_per_task}, ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-task=1"]),
        ({"gpu_request": GpuRequest.gpus_per_task, "launcher": Launcher.torchrun},
         ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-task=4"]),
        ({"gpu_request": GpuRequest.none}, ["--nodes=1", "--ntasks-per-node=4"]),
        ({"device": Device.cpu}, ["--nodes=1", "--ntasks-per-node=4"]),
        ({"device": Device.cpu, "gpu_request": GpuRequest.gres}, ["--nodes=1", "--ntasks-per-node=4"]),
        ({"launcher": Launcher.torchrun, "nodes": "3", "cpus_per_proc": 6},
         ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=24", "--gpus-per-node=4"]),
        ({"cpus_per_proc": 6, "device": Device.cpu}, ["--nodes=1", "--ntasks-per-node=4", "--cpus-per-task=6"]),
    ],
)  # fmt: skip
def test_resource_options_follow_the_cluster_config(values: dict[str, object], options: list[str]) -> None:
    assert requested(**values) == options


def test_every_cluster_key_becomes_its_sbatch_option() -> None:
    keys = ("mem", "time", "partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation")
    given = {key: f"{number}:00:00" if key == "time" else f"x{number}" for number, key in enumerate(keys)}
    options = requested(**given, exclusive=True, sbatch_extra={"hold": "", "mail-type": "FAIL", "comment": "a b"})
    assert options[3:] == [
        *(f"--{key}={value}" for key, value in given.items()),
        *("--exclusive", "--mail-type=FAIL", "--comment=a b", "--hold"),
    ]


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (("exclusive", ""), "--exclusive"),
        (("nodes", "2"), "--nodes=2"),
        (("exclude", "n[3,7]"), "--exclude=n[3,7]"),
        (("comment", "two words"), '--comment="two words"'),
        (("comment", "it's"), '--comment="it\'s"'),
        (("comment", 'say "so"'), r'--comment="say \"so\""'),
        (("comment", "a\\nb\\"), r'--comment="a\\nb\\"'),
        (("comment", "a#b"), '--comment="a#b"'),
        (("comment", "$(date)"), '--comment="$(date)"'),
        (("comment", "Grüße"), '--comment="Grüße"'),
    ],
)
def test_option_is_quoted_for_an_sbatch_line(option: tuple[str, str], line: str) -> None:
    assert _as_line(option) == line


def test_sbatch_extra_rejects_options_that_config_keys_set() -> None:
    """sbatch_extra rejects every option that the config sets through a key of its own."""
    keys = ("mem", "partition", "account", "qos", "constraint", "nodelist", "exclude")
    everything = cluster(**dict.fromkeys(keys, "1"), reservation="r", time="1-0", cpus_per_proc=1, exclusive=True)
    names = {name for name, _ in _job_options(everything, "name", Path("/run"), Path("/here"))}
    assert len(names) == 20
    for name in names:
        assert name in NAMED_ELSEWHERE, name
        with pytest.raises(ConfigError, match=f"cluster.sbatch_extra.{name}=x: is set by"):
            cluster(sbatch_extra={name: "x"})


@pytest.mark.parametrize("name", [*NOT_A_SUBMISSION, "test-onl", "wai", "hel", "usa"])
def test_sbatch_options_that_submit_no_job_are_rejected(name: str) -> None:
    """Their abbreviations too, because sbatch accepts them."""
    with pytest.raises(ConfigError, match=f"cluster.sbatch_extra.{name}=: (would|is already)"):
        cluster(sbatch_extra={name: ""})
    cluster(sbatch_extra={"wait-all-nodes": "1"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30", 1800), ("0", 0), ("10:30", 630), ("1:00:00", 3600), ("24:00:00", 86400), ("1-0", 86400)),
        *(("2-12", 216000), ("1-12:30", 131400), ("1-12:30:15", 131415), ("007", 420)),
        *((text, None) for text in ("", "soon", "1:2:3:4", "1-", "-1", "1-2-3", "1.5", "1h", " 5", "infinite")),
        ("1-2:3:4:5", None),
    ],
)
def test_slurm_time_formats_are_parsed(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_container_arguments_mount_each_folder_once() -> None:
    """The run directory and the working directory are mounted once each; a mount may have another target path."""
    mounts = ["/data", "/scratch:/tmp", "/here"]
    folders = ([Path("/run")], Path("/here"))
    pyxis = ContainerConfig(
        runtime=ContainerRuntime.pyxis, image="a#b:c", mounts=mounts, args=["--no-container-mount-home"]
    )
    assert _container_arguments(cluster(container=pyxis), *folders) == [
        "--container-image=a#b:c",
        "--container-mounts=/data:/data,/scratch:/tmp,/here:/here,/run:/run",
        "--container-workdir=/here",
        "--no-container-mount-home",
    ]
    apptainer = ContainerConfig(runtime=ContainerRuntime.apptainer, image="x.sif", mounts=mounts, args=["--nv"])
    assert _container_arguments(cluster(container=apptainer), *folders) == [
        *("apptainer", "exec", "--bind=/data", "--bind=/scratch:/tmp", "--bind=/here", "--bind=/run", "--pwd=/here"),
        *("--nv", "x.sif"),
    ]
    assert _container_arguments(cluster(), *folders) == []
