"""The model and tokenizer of a source on one device, in one process without a process group."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from components import checkpoint, models
from components.checkpoint.stored_tensors import check_trained_over, fingerprint_by_blocks
from components.config.schema.model import Attention, DType, ModelConfig
from components.config.schema.parallelism import Strategy
from components.models.build import load_config
from components.models.lora import BASE_FORMAT, BASE_WEIGHTS
from components.models.tokenizer import TOKENIZER_FILES
from components.models.weights.weight_sources import SafetensorsTensors, saved_tensors
from components.protocol.errors import ConfigError
from components.torch_kernels import torch_dtype
from components.training.prepared import autocast_dtype, compute_dtype, stored_dtype
from scripts._chat.chat_source import ADAPTER_WEIGHTS, AdapterSource, ChatSource, CheckpointSource, ExportSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model in evaluation mode, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    autocast: torch.dtype | None
    """Autocast dtype of the forward; None: it needs no autocast."""
    title: str
    """Model, origin, dtype and device, for a heading."""
    notes: list[str]
    """What differs from the request or the run."""

    def computing(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, self.autocast)


def load_chat_model(source: ChatSource, device: torch.device) -> ChatModel:
    """Verify and load a source. Raises ConfigError if files are damaged, or the model cannot be built."""
    if isinstance(source, CheckpointSource):
        return _from_checkpoint(source, device)
    if isinstance(source, ExportSource):
        return _from_export(source, device)
    return _from_adapter(source, device)


def _from_checkpoint(source: CheckpointSource, device: torch.device) -> ChatModel:
    """Load the model as its run computes it: with its adapters, kernels and compute dtype.

    Where FSDP2 casts the parameters that it gathers, they are cast here.
    """
    cfg, peft, notes = source.model, source.peft, list(source.notes)
    if cfg.dtype == DType.auto:
        saved = checkpoint.stored_dtype_of(source.path)
        dtype = DType(saved) if saved is not None else stored_dtype(cfg, device, adapts=peft.adapts)
        cfg = replace(cfg, dtype=dtype)
    if device.type == "cpu" and cfg.attention in (Attention.flash_attention_2, Attention.flex_attention):
        notes.append(f"attention: sdpa, because {cfg.attention} needs a GPU")
        cfg = replace(cfg, attention=Attention.sdpa)
    tokenizer = models.load_tokenizer(cfg)
    model = models.build_on_meta(cfg, len(tokenizer))
    models.add_adapters(model, peft, exports=False)
    models.materialize(model, device)
    if peft.adapts:  # a checkpoint of adapters does not contain base weights
        models.fill_weights(model, cfg, source.seed)
    checkpoint.load_model_weights(source.path, model, averaged=source.averaged)
    compute, _ = compute_dtype(cfg, device)
    if source.parallelism.strategy == Strategy.fsdp2 and compute != torch_dtype(cfg.stored_dtype()):
        for parameter in model.parameters():
            if parameter.is_floating_point():  # packed 4-bit weights are integers
                parameter.data = parameter.data.to(compute)
    weights = f"step {source.step}{', averaged weights' * source.averaged}"
    title = _title(model, f"{source.path.parent.parent.name}, {weights}", compute)
    return ChatModel(model.eval(), tokenizer, autocast_dtype(source.parallelism, cfg, compute), title, notes)


def _from_export(source: ExportSource, device: torch.device) -> ChatModel:
    cfg = _in_its_dtype(source.model, device)
    tokenizer = models.load_tokenizer(cfg)
    model = _load(cfg, len(tokenizer), device)
    return ChatModel(model, tokenizer, None, _title(model, f"{source.path.parent.name}/{source.path.name}"), [])


def _from_adapter(source: AdapterSource, device: torch.device) -> ChatModel:
    from peft import PeftModel  # takes two seconds to import
    from safetensors import SafetensorError

    cfg = _in_its_dtype(source.model, device)
    if any((source.path / name).is_file() for name in TOKENIZER_FILES):
        cfg = replace(cfg, tokenizer=str(source.path))
    tokenizer = models.load_tokenizer(cfg)
    base = _load(cfg, None, device)
    if len(tokenizer) > base.get_input_embeddings().num_embeddings:  # the adapter holds the rows of new tokens
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    notes = _compare_base(source, base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads deprecated attributes of transformers
            model: Any = PeftModel.from_pretrained(base, str(source.path), torch_device=str(device))
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{source.path}: PEFT cannot apply the adapter to {cfg.path}: {' '.join(str(error).split()):.300}; give an "
            "adapter that was trained on this base model"
        ) from error
    title = _title(base, f"{source.path.parent.name}/{source.path.name} on {cfg.path}")
    return ChatModel(model.eval(), tokenizer, None, title, notes)


def _compare_base(source: AdapterSource, base: PreTrainedModel) -> list[str]:
    """Reject other base weights than an adapter was trained over; return a note if they cannot be compared."""
    stored, path = SafetensorsTensors([source.path / ADAPTER_WEIGHTS]), source.model.path
    header, names = stored.metadata(), stored.shapes()
    trained_over = header.get(BASE_WEIGHTS, "")
    if BASE_FORMAT in header:
        return [f"adapter: applied to {path}, but trained over its weights in 4 bits (QLoRA), as RUN/export has them"]
    if not trained_over:
        return ["adapter: does not state the weights that it was trained over"]
    rounds = base.dtype == torch.bfloat16 and load_config(source.model).dtype != torch.bfloat16
    if rounds and not trained_over.startswith("bfloat16"):
        return ["adapter: its base weights are not compared, because they are rounded to bfloat16 here"]
    frozen = {
        name: each
        for name, each in saved_tensors(base).items()
        if isinstance(each, torch.nn.Parameter) and f"base_model.model.{name}" not in names
    }

    def fingerprints(dtype: torch.dtype) -> list[str]:
        return [fingerprint_by_blocks(frozen, lambda name, index: frozen[name].data[index], {base.dtype: dtype})]

    check_trained_over(str(source.path), trained_over, f"those of {path}", "restore these", fingerprints)
    return []


def _in_its_dtype(cfg: ModelConfig, device: torch.device) -> ModelConfig:
    """Return the config of a model that is computed in the dtype of its files; float32 files in bfloat16 on a GPU."""
    name = str(load_config(cfg).dtype).removeprefix("torch.")
    stored = DType(name) if name in set(DType) - {DType.auto} else DType.float32  # which holds all float16 values
    compute, _ = compute_dtype(replace(cfg, dtype=stored), device)
    narrows = device.type == "cuda" and stored == DType.float32
    return replace(cfg, dtype=DType(str(compute).removeprefix("torch.")) if narrows else stored)


def _load(cfg: ModelConfig, tokens: int | None, device: torch.device) -> PreTrainedModel:
    model = models.build_on_meta(cfg, tokens)
    models.materialize(model, device)
    models.fill_weights(model, cfg, seed=0)
    return model.eval()


def _title(model: PreTrainedModel, origin: str, dtype: torch.dtype | None = None) -> str:
    millions = models.count_parameters(model).total / 1e6
    name = str(dtype or model.dtype).removeprefix("torch.")
    return f"{origin}: {model.config.model_type}, {millions:,.3g}M parameters, {name} on {model.device}"
