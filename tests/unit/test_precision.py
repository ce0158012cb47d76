"""run.deterministic: variables that contradict it are rejected, and a context restores torch's state."""

from __future__ import annotations

import pytest
import torch

from components.config.schema.run import RunConfig
from components.launch.machine import set_deterministic_variables
from components.models.weights.shards import local_part
from components.protocol.errors import ConfigError
from components.training.prepared import deterministic_kernels
from tests.distributed.tiny_runs import build, cell_named, start
from tests.harness import run_ranks

ON = RunConfig(deterministic=True)


def state() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, filled)


def test_context_restores_the_state_also_after_an_error() -> None:
    before = state()
    with deterministic_kernels():
        assert state() == (True, True, False, False)
    assert state() == before
    named = "run.deterministic=true: put_ has no deterministic kernel; set run"
    with pytest.raises(RuntimeError, match=named), deterministic_kernels():
        torch.ones(2).put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"^another$"), deterministic_kernels():
        raise RuntimeError("another")
    assert state() == before


def test_variables_are_set_before_cuda_starts_and_keep_a_smaller_workspace() -> None:
    environ: dict[str, str] = {}
    set_deterministic_variables(RunConfig(), environ)
    assert environ == {}
    set_deterministic_variables(ON, environ)
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environ["FLASH_ATTENTION_DETERMINISTIC"] == environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    set_deterministic_variables(ON, environ)
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "cuBLAS is not deterministic with CUBLAS_WORKSPACE_CONFIG=:0:0"),
        ("TORCHINDUCTOR_DETERMINISTIC", "0", "contradicts TORCHINDUCTOR_DETERMINISTIC=0"),
    ],
)
def test_variable_that_contradicts_the_setting_is_rejected(name: str, value: str, rule: str) -> None:
    environ = {name: value}
    with pytest.raises(ConfigError, match=f"run.deterministic=true: {rule}; unset the variable, or set it to"):
        set_deterministic_variables(ON, environ)
    set_deterministic_variables(RunConfig(), environ)
    assert environ == {name: value}


def test_two_runs_on_two_ranks_are_bit_equal() -> None:
    """The whole step of a mixture of experts under FSDP2: none of its operators lacks a deterministic kernel."""
    cell, built = cell_named("mixtral", "fsdp2", 2), build("mixtral")

    def weights(rank: int) -> list[torch.Tensor]:
        with deterministic_kernels():
            run = start(cell, built)
            losses, _ = run.train(2)
        return [torch.tensor(losses), *(local_part(each).detach() for each in run.model.parameters())]

    def compare(rank: int) -> bool:
        return all(torch.equal(one, other) for one, other in zip(weights(rank), weights(rank), strict=True))

    assert run_ranks(2, compare) == [True, True]
