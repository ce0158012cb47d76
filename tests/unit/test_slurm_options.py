"""The config as sbatch options: requested resources, quoting, containers and Slurm time formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.config.schema.cluster import ClusterConfig, Device, SlurmClusterConfig
from components.config.schema.slurm import (
    NAMED_ELSEWHERE,
    NOT_A_SUBMISSION,
    ContainerConfig,
    ContainerRuntime,
    GpuRequest,
    Launcher,
    seconds_of,
)
from components.launch.slurm.script import as_argument, as_line, container_arguments, job_options, resource_options
from components.protocol.errors import ConfigError


def cluster(**values: object) -> ClusterConfig:
    return SlurmClusterConfig(**{"procs_per_node": "4", **values})


def requested(**values: object) -> list[str]:
    return [as_argument(option) for option in resource_options(cluster(**values))]


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4"]),
        ({"nodes": "4-8"}, ["--nodes=4-8", "--mincpus=4", "--gpus-per-node=4"]),
        (
            {"nodes": "4-8", "cpus_per_proc": 6, "device": Device.cpu},
            ["--nodes=4-8", "--mincpus=24", "--cpus-per-task=6"],
        ),
        ({"gpu_request": GpuRequest.gres}, ["--nodes=1", "--ntasks-per-node=4", "--gres=gpu:4"]),
        ({"gpu_request": GpuRequest.none}, ["--nodes=1", "--ntasks-per-node=4"]),
        ({"device": Device.cpu}, ["--nodes=1", "--ntasks-per-node=4"]),
        ({"device": Device.cpu, "gpu_request": GpuRequest.gres}, ["--nodes=1", "--ntasks-per-node=4"]),
        (
            {"launcher": Launcher.torchrun, "nodes": "3", "cpus_per_proc": 6},
            ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=24", "--gpus-per-node=4"],
        ),
        ({"cpus_per_proc": 6, "device": Device.cpu}, ["--nodes=1", "--ntasks-per-node=4", "--cpus-per-task=6"]),
    ],
)
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
    assert as_line(option) == line


def test_sbatch_extra_rejects_options_that_config_keys_set() -> None:
    """sbatch_extra rejects every option that the config sets through a key of its own."""
    everything = cluster(
        **dict.fromkeys(("mem", "partition", "account", "qos", "constraint", "nodelist", "exclude"), "1"),
        reservation="r",
        time="1-0",
        cpus_per_proc=1,
        exclusive=True,
    )
    names = {name for name, _ in job_options(everything, "name", Path("/run"), Path("/here"))}
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
        *(
            (text, None)
            for text in ("", "soon", "1:2:3:4", "1-", "-1", "1-2-3", "1.5", "1h", " 5", "infinite", "1-2:3:4:5")
        ),
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
    assert container_arguments(cluster(container=pyxis), *folders) == [
        "--container-image=a#b:c",
        "--container-mounts=/data:/data,/scratch:/tmp,/here:/here,/run:/run",
        "--container-workdir=/here",
        "--no-container-mount-home",
    ]
    apptainer = ContainerConfig(runtime=ContainerRuntime.apptainer, image="x.sif", mounts=mounts, args=["--nv"])
    assert container_arguments(cluster(container=apptainer), *folders) == [
        *("apptainer", "exec", "--bind=/data", "--bind=/scratch:/tmp", "--bind=/here", "--bind=/run", "--pwd=/here"),
        *("--nv", "x.sif"),
    ]
    assert container_arguments(cluster(), *folders) == []
