"""The six walks of the architecture page, and their pictures: what something passes on its way through Meshbook."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import Environment


@dataclass(frozen=True)
class Stop:
    """One stop of a walk."""

    file: str
    """Path from the root of the repository."""
    name: str
    """Function, class or method (Class.method) that the file defines; empty for a file that is no Python module."""
    text: str
    """What happens there."""


@dataclass(frozen=True)
class Walk:
    """A picture of the architecture page."""

    file: str
    """Name of the picture without its ending."""
    title: str
    stops: tuple[Stop, ...]


def _walk(file: str, title: str, *stops: tuple[str, str, str]) -> Walk:
    return Walk(file, title, tuple(Stop(*stop) for stop in stops))


WALKS = (
    _walk(
        "walk_command",
        "A command: from the shell to main(cfg) on every rank",
        ("components/launch/recipe.py", "recipe", "Decorates main(cfg). Imports no torch."),
        ("components/launch/start.py", "start", "Not on a rank: --help, a sweep, or a run."),
        (
            "components/config/compose/command_line.py",
            "compose_from_command_line",
            "Compose conf/ and the overrides; build the dataclasses. All errors at once.",
        ),
        ("components/config/rules.py", "validate", "Rules over several sections, the mesh and the model's sizes."),
        (
            "components/launch/run_checks.py",
            "problems_before_start",
            "Files, packages, hub, processes of this machine.",
        ),
        ("components/launch/open_run.py", "open_run", "Create and lock the run directory; freeze config.yaml."),
        ("components/launch/clusters.py", "backend_of", "Look up the backend of cluster.kind."),
        ("components/launch/local.py", "LocalBackend.submit", "local: start the ranks and watch them."),
        ("components/launch/job/scheduler.py", "Scheduler.submit", "slurm, k8s: copy the code, submit, return."),
        ("components/launch/rank.py", "run_worker", "On every rank: read config.yaml, call main(cfg)."),
    ),
    _walk(
        "walk_batch",
        "A batch: from a row of your file to the model's input",
        ("components/data/loading.py", "build_dataset", "Read, render and tokenize a split, or map its cache."),
        (
            "components/data/packing.py",
            "SampleOrder.at",
            "Position in the run to sample: a function of seed and position.",
        ),
        ("components/data/batches.py", "BatchPlan", "Rows of the global batch for this dp rank, in micro-batches."),
        ("components/data/batches.py", "TrainBatches.at", "The micro-batches of a step. The cursor ignores the mesh."),
        ("components/data/batches.py", "collate", "Pad, shift targets, mark documents: one Batch."),
        ("components/batch.py", "Batch", "input_ids, targets, position_ids, document bounds, values per row."),
        ("components/training/attempt.py", "ReadAhead", "A thread does this one step ahead, into pinned memory."),
        ("components/training/step.py", "local_batch", "Under cp, cut each row to this rank's tokens."),
        ("components/training/step.py", "training_loss", "Pass the inputs and targets to the model."),
    ),
    _walk(
        "walk_parameter",
        "A parameter: from a file of weights to an update",
        ("components/models/build.py", "build_on_meta", "The Hugging Face model, without memory."),
        ("components/models/anatomy.py", "read_anatomy", "Where its layers, embedding, head and experts are."),
        ("components/training/preparation.py", "prepare", "The order of all that follows."),
        ("components/distributed/parallelizer.py", "parallelize", "Experts, tensor parallelism, cp, stages, FSDP2."),
        ("components/distributed/apply_tp.py", "apply_tensor_parallel", "tp: shard the matrices of a layer."),
        ("components/distributed/fsdp.py", "shard_with_fsdp2", "fsdp: shard what is left, layer by layer."),
        ("components/models/weights/loading.py", "fill_weights", "Each rank reads only its own shards."),
        ("components/distributed/parallelizer.py", "wrap_replicas", "DDP, a pipeline, or the model as it is."),
        ("components/training/optimizers/optim.py", "build_optimizer", "Groups of parameters, decay, learning rate."),
        (
            "components/training/optimizers/gradients.py",
            "step_if_finite",
            "Update, undone if a gradient is not finite.",
        ),
    ),
    _walk(
        "walk_loss",
        "A loss: one division by a global count",
        ("components/training/step.py", "train_step", "One optimizer step."),
        ("components/training/objectives/base.py", "TokenObjective", "Counts its units: tokens, pairs, texts."),
        ("components/training/loss.py", "sum_over_ranks", "Global number of units, before the first forward."),
        ("components/training/step.py", "training_loss", "Forward of a micro-batch: a loss sum, not a mean."),
        ("components/training/objectives/loss_head.py", "attach_loss_head", "The LM head takes targets, returns sums."),
        (
            "components/training/objectives/chunked_loss.py",
            "linear_token_loss",
            "Logits of one chunk of tokens at a time.",
        ),
        ("components/distributed/fsdp.py", "get_sync_ctx", "Backward of loss / units; gradients are summed."),
        ("components/training/optimizers/gradients.py", "gradient_norm", "Global norm over all axes, then clipping."),
        ("components/training/state.py", "StepReader", "Read on the host one step later, so nothing waits."),
        ("components/observability/reporter.py", "Reporter", "Console, metrics.jsonl, loss.png, wandb."),
    ),
    _walk(
        "walk_checkpoint",
        "A checkpoint: from a save to a resume on another mesh",
        ("components/training/run.py", "Run.save", "The recipe decides when."),
        ("components/checkpoint/saver.py", "Saver.save", "At once, or in a thread (checkpoint.async_save)."),
        ("components/checkpoint/save.py", "take_snapshot", "Tensors, optimizer state, data cursor, random states."),
        ("components/checkpoint/stored_tensors.py", "SaveBlocks", "Each block of a tensor is written by one rank."),
        ("components/checkpoint/save.py", "write_snapshot", "safetensors and JSON in a temporary folder."),
        ("components/checkpoint/manifest.py", "Manifest", "Sizes and hashes, written last."),
        ("components/checkpoint/save.py", "save_checkpoint", "One rename publishes step_N."),
        ("components/checkpoint/manifest.py", "reasons_to_keep", "keep, keep_every, keep_best."),
        ("components/checkpoint/load.py", "find_checkpoint", "Resume: the newest checkpoint that is intact."),
        ("components/checkpoint/load.py", "load_checkpoint", "Each rank reads its blocks, on any mesh."),
    ),
    _walk(
        "walk_signal",
        "A signal: from a preemption to the resumed run",
        ("slurm/train.sbatch.j2", "", "The batch script receives USR2 or TERM, and forwards it."),
        ("components/protocol/processes.py", "record_stop_signals", "A rank records signals until its loop runs."),
        ("components/watch/watchdog.py", "StopRequest", "Handles them: a flag of this rank."),
        ("components/training/step.py", "train_step", "Sums the flags over all ranks at the end of the step."),
        ("components/watch/watchdog.py", "StopRequest.update", "All ranks agree, at the same step."),
        ("components/training/run.py", "Run.steps", "Ends the loop of the recipe."),
        ("components/training/run.py", "Run.finish", "Saves a checkpoint and waits for it."),
        ("components/training/attempt.py", "Attempt", "Writes the status to result.json; exit status 0."),
        ("components/launch/job/attempts.py", "conclude", "The batch script calls it: what follows?"),
        (
            "components/launch/job/policy.py",
            "reason_to_end",
            "One table of limits for all schedulers.",
        ),
        ("components/launch/job/attempts.py", "begin", "The next attempt: its number, its nodes, its logs."),
    ),
)

_SVG = """\
<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}" viewBox="0 0 {{ width }} {{ height }}"
 role="img" font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" font-size="12.5" fill="#1d2730">
<title>{{ walk.title }}</title>
<rect width="100%" height="100%" fill="#fff"/>
<text x="12" y="26" font-size="15" font-weight="bold">{{ walk.title }}</text>
{% for stop in walk.stops %}
<g transform="translate(12 {{ 44 + 54 * loop.index0 }})">
<rect width="400" height="40" rx="5" fill="#f3f5f7" stroke="#c9d1d8"/><rect width="4" height="40" fill="#2f6f9f"/>
<text x="14" y="17" font-size="13" font-weight="bold">{{ stop.name or stop.file.rpartition("/")[2] }}</text>
<text x="14" y="32" font-size="11" fill="#566470">{{ stop.file }}</text><text x="416" y="24">{{ stop.text }}</text>
{% if not loop.first %}
<path d="M24-14v13m-4-5 4 5 4-5" fill="none" stroke="#566470" stroke-width="1.5"/>
{% endif %}
</g>
{% endfor %}
</svg>
"""


def draw(walk: Walk) -> str:
    """Return the SVG of a walk: a box per stop with its function and file, and what happens beside it."""
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    # A character is on average 0.57 of the font size wide in the widest of usual fonts, DejaVu Sans.
    width = round(440 + max(len(stop.text) for stop in walk.stops) * 12.5 * 0.57)
    return environment.from_string(_SVG).render(walk=walk, width=width, height=44 + 54 * len(walk.stops))
