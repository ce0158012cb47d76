"""A checkpoint of a training run, opened for reading its weights block by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.compose.frozen import read_optional_section, read_section
from components.config.schema import DataConfig, ModelConfig, ObjectiveConfig, PeftConfig, RunConfig, ScoreConfig
from components.config.schema.model import QAT_GROUP_SIZES, Attention, DType, Float8, Qat
from components.config.schema.recipes import score_labels
from components.config.schema.run import PeftExport
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from components.checkpoint import StoredWeights


@dataclasses.dataclass(slots=True)
class RunSections:
    """The sections of a training run that an export needs, whatever its recipe."""

    run: RunConfig
    model: ModelConfig
    peft: PeftConfig
    labels: tuple[str, ...] | None
    """Names of the outputs of a score head; None: the model has an LM head."""


def read_run(run_dir: Path, *, trust_remote_code: bool) -> RunSections:
    """Read the frozen config of a run. Raises ConfigError, also if the model needs code that is not trusted."""
    file = run_dir / "config.yaml"
    cfg = RunSections(
        run=read_section(file, "run", RunConfig),
        model=read_section(file, "model", ModelConfig),
        peft=read_optional_section(file, "peft", PeftConfig) or PeftConfig(),
        labels=_labels_of(file),
    )
    if cfg.model.trust_remote_code and not trust_remote_code:
        raise ConfigError(
            f"{run_dir}: the model {cfg.model.path} runs Python code from its repository; read that code, then add "
            "--trust-remote-code"
        )
    # The export runs no forward, so the run's attention kernels and torchao need not be installed.
    unquantized = {
        "float8": Float8.none,
        "float8_emulate": False,
        "qat": Qat.none,
        "qat_group_size": QAT_GROUP_SIZES[0],
    }
    cfg.model = dataclasses.replace(cfg.model, attention=Attention.eager, **unquantized)
    return cfg


def _labels_of(file: Path) -> tuple[str, ...] | None:
    objective = read_optional_section(file, "objective", ObjectiveConfig)
    if not isinstance(objective, ScoreConfig):
        return None
    return score_labels(read_section(file, "data", DataConfig), objective)


class OpenCheckpoint:
    """A verified checkpoint, its model on the meta device, and its tokenizer."""

    def __init__(self, path: Path, cfg: RunSections, *, averaged: bool = False, exports_adapter: bool = False) -> None:
        """Verify the checkpoint and compare it with the model of its run. Raises ConfigError.

        Args:
            averaged: Read the moving average of the trained weights in place of the weights.
            exports_adapter: Prepare the model for an export of the adapters alone.
        """
        from components import models
        from components.checkpoint import StoredWeights, stored_dtype_of
        from components.models.weights.weight_sources import saved_tensors

        if cfg.model.dtype == DType.auto and (saved := stored_dtype_of(path)) is not None:
            cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype=DType(saved)))
        self.cfg, self.path = cfg, path
        self.stored: StoredWeights = StoredWeights(path, averaged=averaged)
        self.tokenizer = models.load_tokenizer(cfg.model, path)
        self.model: Any = models.build_on_meta(cfg.model, len(self.tokenizer), cfg.labels)
        models.add_adapters(self.model, dataclasses.replace(cfg.peft, export=PeftExport.both), exports=exports_adapter)
        self._expected = saved_tensors(self.model)
        self.stored.check(
            {name: each for name, each in self._expected.items() if each.requires_grad or not cfg.peft.adapts}
        )

    def adapters(self) -> dict[str, torch.Tensor]:
        """Read the adapters as full tensors, by parameter name."""
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        return {
            name: self.stored.read(name, tuple(slice(0, size) for size in each.shape)).to(each.dtype)
            for name, each in trained.items()
        }

    def reader(self, *, rounds: bool = True) -> Callable[[str, Any], torch.Tensor]:
        """Return a function that reads a block of a tensor, with the adapters merged. Raises ConfigError.

        `rounds`: as for `models.Merge`.
        """
        from components.models.weights.weight_sources import require_finite

        read = self._merged(rounds) if self.cfg.peft.adapts else self.stored.read
        return lambda name, index: require_finite(read(name, index), f"{self.path}: {name}")

    def _merged(self, rounds: bool) -> Callable[[str, Any], torch.Tensor]:
        from components import models

        base = models.weight_reader(self.model, self.cfg.model, self.cfg.run.seed)
        frozen = {name: each for name, each in self.model.named_parameters() if not each.requires_grad}
        self.stored.check_base_weights(frozen, base)
        merge = models.Merge(self.model, rounds=rounds)
        # A score head is trained as a whole beside the adapters, so it is read from the checkpoint.
        whole = {name for name, trained in self.adapters().items() if not merge.take(name, trained)}

        def read(name: str, index: Any) -> torch.Tensor:
            if name in whole:
                return self.stored.read(name, index).to(self._expected[name].dtype)
            return merge.reader(name, partial(base, name))(index)

        return read
