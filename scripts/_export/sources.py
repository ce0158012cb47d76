"""The weights that scripts/average.py merges: checkpoints, exports and adapters of one architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.checkpoint.manifest import Manifest, ManifestError
from components.config.model_files import (
    ADAPTER_FILES,
    GGUF_BASE,
    PEFT_DEFAULTS,
    VOCABULARY_MODULES,
    check_adapter,
    locate,
)
from components.config.schema.model import Attention, DType, ModelConfig
from components.config.schema.run import ALL_LINEAR, PeftConfig, PeftMethod
from components.protocol.errors import ConfigError, raise_all
from components.protocol.run_files import CHECKPOINT_MANIFEST, CHECKPOINTS, checkpoint_folders
from components.protocol.safe_parsing import load_json
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
    """Weights to merge."""

    path: Path
    model: Any
    """The model on the meta device."""
    tokenizer: Any
    tensors: dict[str, torch.Tensor]
    """Tensors of the model that an export contains, on the meta device."""
    read: Callable[[str, Any], torch.Tensor]
    """Returns a block of a tensor; adapters are merged."""
    base: str | None = None
    """Path of the base model of an adapter."""
    new_tokens: Sequence[str] = ()
    """Tokens that its tokenizer has and that of the base lacks."""
    read_base: Callable[[str, Any], torch.Tensor] | None = None
    """Returns a block of the dequantized base of a QLoRA adapter; None: the base is that of its files."""


def find_sources(given: Sequence[Path], steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints, exports and adapters to merge: each given one, and those of the given run directories.

    Args:
        given: Run directories, checkpoints, exported folders or folders of adapters.
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
        elif not any((path / name).exists() for name in (CHECKPOINT_MANIFEST, EXPORT_CONFIG, ADAPTER_FILES[0])):
            problems.append(
                f"{path}: neither a run directory (no {CHECKPOINTS}/), a checkpoint (no {CHECKPOINT_MANIFEST}), an "
                f"export (no {EXPORT_CONFIG}) nor an adapter (no {ADAPTER_FILES[0]}); give one of them"
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
        kinds = {CHECKPOINT_MANIFEST: _open_checkpoint, ADAPTER_FILES[0]: _open_adapter, EXPORT_CONFIG: _open_export}
        source = next(kind for name, kind in kinds.items() if (path / name).exists())(path, trust_remote_code)
        if sources and (problem := _difference(sources[0], source)):
            raise ConfigError(f"{path}: cannot be averaged with {paths[0]}: {problem}")
        sources.append(source)
    return sources


def _open_checkpoint(path: Path, trust_remote_code: bool) -> Source:
    opened = OpenCheckpoint(path, read_run(path.parent.parent, trust_remote_code=trust_remote_code))
    return _source(path, opened.model, opened.tokenizer, opened.reader(rounds=False))


def open_base(path: str | None, sources: Sequence[Source], *, trust_remote_code: bool) -> Source:
    """Open the base model of --base, or of the adapters. Raises ConfigError if it is unknown or of other shapes."""
    named = {source.base for source in sources if source.base is not None}
    if path is None and len(named) != 1:
        raise ConfigError(
            f"--base: needed, because {'the adapters name several' if named else 'the sources name no'} base model"
            f"{'s (' + ', '.join(sorted(named)) + ')' if named else ''}; give that which all were trained from"
        )
    base = _open_model(path or named.pop(), trust_remote_code, sources[0])
    if problem := _difference(sources[0], base, compares_tokens=False):
        raise ConfigError(f"--base {base.path}: is not the base of {sources[0].path}: {problem}")
    for source in sources:
        if path is not None and source.base is not None and locate(source.base) != locate(path):
            cfg, dtype = source.model.built_from, source.model.dtype
            if _fingerprint(source.model, cfg, dtype) != _fingerprint(source.model, replace(cfg, path=path), dtype):
                raise ConfigError(
                    f"--base {path}: has other weights than {source.base}, over which {source.path} was trained, and "
                    "the difference would count as a change; leave --base out, or give that model"
                )
    return base


def _open_adapter(path: Path, trust_remote_code: bool) -> Source:
    import torch
    from torch import nn

    from components import models
    from components.checkpoint.stored_tensors import check_trained_over
    from components.models.lora import BASE_FORMAT, BASE_WEIGHTS
    from components.models.weights.weight_sources import SafetensorsTensors

    peft, base = _adapter_config(path)
    cfg, header = _config_of(base, trust_remote_code), SafetensorsTensors([path / ADAPTER_FILES[1]]).metadata()
    if BASE_FORMAT in header:  # the weights are quantized in the dtype that they had in the run
        dtype = header.get(BASE_WEIGHTS, "").partition(" ")[0]
        peft = replace(peft, method=PeftMethod.qlora)
        cfg = replace(cfg, dtype=DType(dtype)) if dtype in set(DType) - {DType.auto} else cfg
    cfg, tokenizer = _with_tokens(cfg, path)
    model: Any = models.build_on_meta(cfg, len(tokenizer))
    models.add_adapters(model, peft, exports=False)
    read_base = models.weight_reader(model, cfg, seed=0)
    for name, parameter in list(model.named_parameters()):
        if parameter.requires_grad:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_parameter(
                leaf, nn.Parameter(torch.empty_like(parameter, device="cpu"))
            )
    if trained_over := models.read_adapter(model, peft):
        found = f"those of {base}, which its {ADAPTER_FILES[0]} names"
        check_trained_over(
            str(path), trained_over, found, "restore these", lambda dtype: [_fingerprint(model, cfg, dtype)]
        )
    merge = models.Merge(model, rounds=False)
    whole = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    unchanged = models.Merge(model, rounds=False)  # adapters without an effect, to unpack the base
    for name, values in whole.items():
        if name.endswith(("lora_A", "lora_B")):
            unchanged.take(name, torch.zeros_like(values))
    whole = {name: values for name, values in whole.items() if not merge.take(name, values)}

    def read(name: str, index: Any) -> torch.Tensor:
        return whole[name][index] if name in whole else merge.reader(name, partial(read_base, name))(index)

    def unpacked(name: str, index: Any) -> torch.Tensor:
        return unchanged.reader(name, partial(read_base, name))(index)

    source = replace(_source(path, model, tokenizer, read), base=base, new_tokens=cfg.new_tokens)
    return replace(source, read_base=unpacked) if BASE_FORMAT in header else source


def _with_tokens(cfg: ModelConfig, adapter: Path) -> tuple[ModelConfig, Any]:
    """Return the config of an adapter's base with the adapter's tokens, and the tokenizer. Raises ConfigError."""
    from components.models import load_tokenizer
    from components.models.build import load_config

    if not _has_tokenizer(str(adapter)):
        return cfg, load_tokenizer(cfg)
    own = load_tokenizer(replace(cfg, tokenizer=str(adapter)))
    if _has_tokenizer(str(cfg.path)):
        known = len(load_tokenizer(cfg))
        tokens = sorted((number, token) for token, number in own.get_vocab().items() if number >= known)
        return replace(cfg, new_tokens=[token for _, token in tokens]), own
    if len(own) > (rows := load_config(cfg).get_text_config().vocab_size):
        raise ConfigError(
            f"{adapter}: its tokenizer has {len(own)} tokens, more than the {rows} rows of {cfg.path}, which has no "
            "tokenizer to find the new ones by; give a checkpoint of its run instead"
        )
    return replace(cfg, tokenizer=str(adapter)), own


def _has_tokenizer(path: str) -> bool:
    """Return whether a model has a tokenizer; those of the hub count as having one."""
    from components.models.tokenizer import TOKENIZER_FILES

    files = locate(path)
    folder = Path(files.name_or_folder)
    return not files.is_local or bool(files.gguf_file) or any((folder / name).is_file() for name in TOKENIZER_FILES)


def _fingerprint(model: Any, cfg: ModelConfig, dtype: torch.dtype) -> str:
    """Return the fingerprint in a dtype of the base weights in the files of a model with adapters."""
    from components import models
    from components.checkpoint.stored_tensors import fingerprint_by_blocks
    from components.torch_kernels import torch_dtype

    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    read = models.weight_reader(model, cfg, seed=0)
    return fingerprint_by_blocks(frozen, read, {torch_dtype(cfg.stored_dtype()): dtype})


def _adapter_config(path: Path) -> tuple[PeftConfig, str]:
    """Return the settings of an adapter, and the path of its base model. Raises ConfigError."""
    from components.models.weights.weight_sources import SafetensorsTensors

    try:
        config = load_json(path / ADAPTER_FILES[0])
        rank, alpha = (config.get(name, PEFT_DEFAULTS[name]) for name in ("r", "lora_alpha"))
        base = config["base_model_name_or_path"]
        if type(rank) is not int or type(alpha) not in (int, float):
            raise ValueError(f"r={rank!r} and lora_alpha={alpha!r} must be numbers")
        peft = PeftConfig(
            method=PeftMethod.lora,
            path=str(path),
            rank=rank,
            alpha=alpha,
            target_parameters=list(config.get("target_parameters") or []),
            modules_to_save=list(config.get("modules_to_save") or []),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path / ADAPTER_FILES[0]}: is not the config of a LoRA adapter: {error!r:.200}") from error
    raise_all(check_adapter(peft))
    # The layers in the file: PEFT selects them by several keys, or by a regular expression.
    names = SafetensorsTensors([path / ADAPTER_FILES[1]]).shapes()
    layers = {
        re.split(r"\.(base_layer|lora_)", name.removeprefix("base_model.model."))[0]
        for name in names
        if ".lora_" in name
    }
    others = {target.split(".")[-2] if "." in target else "experts" for target in peft.target_parameters}
    targets = sorted(layer for layer in layers if layer.rpartition(".")[2] not in others | VOCABULARY_MODULES)
    if not layers:
        raise ConfigError(f"{path}: has no factors of LoRA in {ADAPTER_FILES[1]}; give another adapter")
    peft = replace(peft, targets=targets if targets or others else [ALL_LINEAR])
    if not isinstance(base, str):
        raise ConfigError(f"{path}: names no base model; give a checkpoint of its run instead")
    if config.get("task_type") == "SEQ_CLS":
        raise ConfigError(f"{path}: is the adapter of a classifier; give a checkpoint of its run instead")
    return peft, base.removesuffix(GGUF_BASE)


def _open_export(path: Path, trust_remote_code: bool) -> Source:
    return _open_model(str(path), trust_remote_code)


def _config_of(path: str, trust_remote_code: bool) -> ModelConfig:
    """Return the config of a model in the dtype of its files."""
    from components.models.build import load_config

    cfg = ModelConfig(path=path, attention=Attention.eager, trust_remote_code=trust_remote_code)
    name = str(load_config(cfg).dtype).removeprefix("torch.")
    return replace(cfg, dtype=DType(name)) if name in set(DType) - {DType.auto} else cfg


def _open_model(path: str, trust_remote_code: bool, adapted: Source | None = None) -> Source:
    """Open an export, or the base model of a source, of which the latter has the new tokens."""
    from components import models
    from components.models.build import load_config

    cfg = _config_of(path, trust_remote_code)
    if adapted is not None:
        cfg = replace(cfg, new_tokens=list(adapted.new_tokens))
    tokenizer = models.load_tokenizer(cfg) if adapted is None or _has_tokenizer(path) else adapted.tokenizer
    config = load_config(cfg, len(tokenizer))
    is_score_model = any(
        architecture.endswith("ForSequenceClassification") for architecture in config.architectures or []
    )
    labels = [config.id2label[index] for index in sorted(config.id2label)] if is_score_model else None
    model: Any = models.build_on_meta(cfg, len(tokenizer), labels)
    model.config.dtype = config.dtype or model.config.dtype  # float16 too, in which no run stores its weights
    return _source(Path(path), model, tokenizer, models.weight_reader(model, cfg, seed=0))


def _source(path: Path, model: Any, tokenizer: Any, read: Callable[[str, Any], torch.Tensor]) -> Source:
    from components.models.layers import meta_copy
    from components.models.weights.weight_sources import saved_tensors

    return Source(path, model, tokenizer, saved_tensors(meta_copy(model)), read)


def _difference(first: Source, other: Source, *, compares_tokens: bool = True) -> str:
    """Return why two sources cannot be merged; empty if they can."""
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
    if compares_tokens and first.tokenizer.get_vocab() != other.tokenizer.get_vocab():
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


class Changes:
    """What training changed in several models, merged into their base; see scripts/average.py."""

    def __init__(
        self, base: Source, sources: Sequence[Source], weights: Sequence[float], density: float | None = None
    ) -> None:
        """`density`: Share of the largest changes of each tensor that ties keeps; None: task arithmetic.

        A change is that of a source's own base. The result of QLoRA adapters alone is over their dequantized base.
        """
        if all(source.read_base is not None for source in sources):
            base = replace(base, read=sources[0].read_base)
        self._base, self._sources, self._weights, self._density = base, sources, weights, density
        self._thresholds: tuple[str, list[torch.Tensor]] = ("", [])

    def read(self, name: str, index: Any) -> torch.Tensor:
        """Return a block of the merged weights in float64. Raises ConfigError as `read_average` does."""
        import torch

        tensor = self._base.tensors[name]
        if not tensor.is_floating_point():
            return read_average([*self._sources, self._base], [], name, index)
        base = self._base.read(name, index).to(torch.float64)
        changes = [self._change(source, name, index, base) for source in self._sources]
        if self._density is None:
            return base + sum(weight * each for weight, each in zip(self._weights, changes, strict=True))
        if self._thresholds[0] != name:
            self._thresholds = (name, [self._threshold(source, name) for source in self._sources])
        # In float32, as the thresholds are.
        kept = torch.stack(
            [
                each.where(each.abs().float() >= threshold, 0.0)
                for each, threshold in zip(changes, self._thresholds[1], strict=True)
            ]
        )  # (sources, *block)
        agrees = (kept.sign() == kept.sum(0).sign()) & (kept != 0)
        weighted = torch.tensordot(torch.tensor(self._weights, dtype=torch.float64), kept * agrees, 1)
        return base + weighted / agrees.sum(0).clamp(min=1)

    def _change(self, source: Source, name: str, index: Any, base: torch.Tensor) -> torch.Tensor:
        from components.models.weights.weight_sources import require_finite

        own = base if source.read_base is None else source.read_base(name, index).to(base)
        return require_finite(source.read(name, index), f"{source.path}: {name}").to(base) - own

    def _threshold(self, source: Source, name: str) -> torch.Tensor:
        """Return the smallest magnitude of the largest changes that are kept of a tensor, in two passes over it.

        The bits of positive float32 numbers have their order as integers: the first pass counts the upper half of the
        bits, the second the lower half among the numbers with the upper half of the one sought. In float32, since a
        difference of two stored numbers is rarely exact.
        """
        import torch

        from components.models.weights.weight_files import row_blocks

        tensor = self._base.tensors[name]
        keep, upper = max(1, int((self._density or 1.0) * tensor.numel())), None
        for _ in range(2):
            counts = torch.zeros(1 << 16, dtype=torch.int64)
            for index in row_blocks(tensor):
                base = self._base.read(name, index).to(torch.float64)
                bits = self._change(source, name, index, base).abs().float().flatten().view(torch.int32)
                halves = bits >> 16 if upper is None else (bits & 0xFFFF)[bits >> 16 == upper]
                counts += torch.bincount(halves, minlength=1 << 16)
            from_largest = counts.flip(0).cumsum(0)
            place = int((from_largest < keep).sum())  # of the half that holds the number sought, from the largest
            keep -= int(from_largest[place - 1]) if place else 0
            half = (1 << 16) - 1 - place
            if upper is None:
                upper = half
        bits = torch.tensor(((upper or 0) << 16) | half, dtype=torch.int32)
        return bits.view(torch.float32)
