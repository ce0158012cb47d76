"""The weights that scripts/average.py averages: checkpoints of runs and exported folders of one architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.checkpoint.manifest import Manifest, ManifestError
from components.config.schema.model import Attention, DType, ModelConfig
from components.protocol.errors import ConfigError
from components.protocol.run_files import CHECKPOINT_MANIFEST, CHECKPOINTS, checkpoint_folders
from scripts._export.checkpoints import OpenCheckpoint, read_run

if TYPE_CHECKING:
    import torch

EXPORT_CONFIG = "config.json"
"""File that makes a folder an export."""
NOT_ARCHITECTURE = {
    *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),  # the tokenizers are compared
}
"""Keys of a Hugging Face config in which sources may differ."""
SHOWN = 4
"""Maximum number of tensors or keys named in an error."""


@dataclass(slots=True)
class Source:
    """Weights to average."""

    path: Path
    model: Any
    """The model on the meta device."""
    tokenizer: Any
    tensors: dict[str, torch.Tensor]
    """Tensors of the model that an export contains, on the meta device."""
    read: Callable[[str, Any], torch.Tensor]
    """Returns a block of a tensor; adapters are merged."""


def find_sources(given: Sequence[Path], steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints and exports to average: each given one, and those of the given run directories.

    Args:
        given: Run directories, checkpoints or exported folders.
        steps: Steps of the checkpoints of each run directory, in this order; empty: all of them, oldest first.

    Raises:
        ConfigError: A path is none of these, a run directory lacks a step, or a path occurs twice.
    """
    problems = []
    if repeated := sorted({step for step in steps if list(steps).count(step) > 1}):
        problems.append(f"--steps: {_numbers(repeated)} given twice; use --weights to give a checkpoint more weight")
    found: list[Path] = []
    for path in given:
        path = path.expanduser().resolve()
        if not path.is_dir():
            problems.append(f"{path}: no such folder; give a run directory, a checkpoint or an export")
        elif (path / CHECKPOINTS).is_dir():
            try:
                found += _checkpoints_of(path, steps)
            except ConfigError as error:
                problems += error.problems
        elif not (path / CHECKPOINT_MANIFEST).exists() and not (path / EXPORT_CONFIG).exists():
            problems.append(
                f"{path}: neither a run directory (no {CHECKPOINTS}/), a checkpoint (no {CHECKPOINT_MANIFEST}) nor an "
                f"export (no {EXPORT_CONFIG}); give one of them"
            )
        elif steps:
            problems.append(f"--steps: selects checkpoints of run directories, but {path} is not one; leave it out")
        else:
            found.append(path)
    problems += [f"{path}: given twice" for path in sorted({each for each in found if found.count(each) > 1})]
    if not problems and len(found) < 2:
        problems.append(f"{found[0]}: is all there is to average; give at least two checkpoints or exports")
    if problems:
        raise ConfigError(problems)
    return found


def _checkpoints_of(run_dir: Path, steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints of a run; of a step that was saved twice the newer one. Raises ConfigError."""
    saved: dict[int, tuple[int, Path]] = {}
    problems = []
    for path in checkpoint_folders(run_dir / CHECKPOINTS):
        try:
            manifest = Manifest.read(path)
        except ManifestError as error:
            problems.append(f"{path}: not a complete checkpoint: {error}; give the paths of the others")
            continue
        saved[manifest.step] = max(saved.get(manifest.step, (-1, path)), (manifest.serial, path))
    if missing := [step for step in steps if step not in saved]:
        kept = f"those of {_numbers(sorted(saved))}" if saved else "none"
        problems.append(f"--steps: {run_dir} has no checkpoint of {_numbers(missing)}; it keeps {kept}")
    elif not saved and not problems:
        problems.append(f"{run_dir}: no complete checkpoint in {CHECKPOINTS}/; give a run directory that has one")
    if problems:
        raise ConfigError(problems)
    return [saved[step][1] for step in steps or sorted(saved)]


def open_sources(paths: Sequence[Path], *, trust_remote_code: bool) -> list[Source]:
    """Open all sources and compare them with the first. Raises ConfigError for another architecture or shapes."""
    sources: list[Source] = []
    for path in paths:
        source = (_open_checkpoint if (path / CHECKPOINT_MANIFEST).exists() else _open_export)(path, trust_remote_code)
        if sources and (problem := _difference(sources[0], source)):
            raise ConfigError(f"{path}: cannot be averaged with {paths[0]}: {problem}")
        sources.append(source)
    return sources


def _open_checkpoint(path: Path, trust_remote_code: bool) -> Source:
    opened = OpenCheckpoint(path, read_run(path.parent.parent, trust_remote_code=trust_remote_code))
    return _source(path, opened.model, opened.tokenizer, opened.reader())


def _open_export(path: Path, trust_remote_code: bool) -> Source:
    from components import models
    from components.models.build import load_config

    cfg = ModelConfig(path=str(path), attention=Attention.eager, trust_remote_code=trust_remote_code)
    tokenizer = models.load_tokenizer(cfg)
    config = load_config(cfg, len(tokenizer))
    stored = config.dtype
    name = str(stored).removeprefix("torch.")
    if name in set(DType) - {DType.auto}:
        cfg = replace(cfg, dtype=DType(name))
    is_score_model = any(
        architecture.endswith("ForSequenceClassification") for architecture in config.architectures or []
    )
    labels = [config.id2label[index] for index in sorted(config.id2label)] if is_score_model else None
    model: Any = models.build_on_meta(cfg, len(tokenizer), labels)
    model.config.dtype = stored or model.config.dtype  # float16 too, in which no run stores its weights
    return _source(path, model, tokenizer, models.weight_reader(model, cfg, seed=0))


def _source(path: Path, model: Any, tokenizer: Any, read: Callable[[str, Any], torch.Tensor]) -> Source:
    from components.models.layers import meta_copy
    from components.models.weights.weight_sources import saved_tensors

    return Source(path, model, tokenizer, saved_tensors(meta_copy(model)), read)


def _difference(first: Source, other: Source) -> str:
    """Return why two sources cannot be averaged; empty if they can."""
    kinds = [each.model.config.model_type for each in (first, other)]
    if kinds[0] != kinds[1]:
        return f"its architecture is {kinds[1]}, that of the other {kinds[0]}"
    shapes = [{name: tuple(each.shape) for name, each in source.tensors.items()} for source in (first, other)]
    if names := [name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)]:
        return f"tensors differ: {_listed(names, *shapes)}"
    configs = [each.model.config.to_dict() for each in (first, other)]
    keys = (configs[0] | configs[1]).keys() - NOT_ARCHITECTURE
    if unequal := sorted(key for key in keys if configs[0].get(key) != configs[1].get(key)):
        return f"config.json differs: {_listed(unequal, *configs)}"
    if first.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        return "its tokenizer has another vocabulary, so the rows of the embedding belong to other tokens"
    return ""


def _listed(names: Sequence[str], first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    shown = [f"{name} is {other.get(name, 'missing')} instead of {first.get(name, 'missing')}" for name in names]
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def _numbers(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def read_average(sources: Sequence[Source], weights: Sequence[float], name: str, index: Any) -> torch.Tensor:
    """Return a block of the weighted average in float64: one source is read at a time.

    Args:
        weights: One for each source; they add up to 1.

    Raises:
        ConfigError: The values of a tensor of integers, of which there is no average, differ, or a value is not finite.
    """
    import torch

    from components.models.weights.weight_sources import require_finite

    if not sources[0].tensors[name].is_floating_point():
        first = sources[0].read(name, index)
        if different := [each.path for each in sources[1:] if not torch.equal(each.read(name, index), first)]:
            raise ConfigError(f"{different[0]}: {name}, which holds integers, differs from that of {sources[0].path}")
        return first
    total: Any = None
    for source, weight in zip(sources, weights, strict=True):
        part = require_finite(source.read(name, index), f"{source.path}: {name}").to(torch.float64) * weight
        total = part if total is None else total.add_(part)
    return total
