"""Benchmark tasks on every mesh against lm-eval's own Hugging Face backend, HFLM, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tests.suites import PARITY

pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed; make install-dev installs it")
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from components import data, distributed, models, training
from components.checkpoint.save import random_state
from components.config.schema import EvaluateConfig, EvaluationConfig, ParallelismConfig
from components.config.schema.data import IGNORED, DocsDataConfig
from components.config.schema.model import DType, LossMethod, ModelConfig
from components.models.tokenizer import byte_tokenizer
from components.planning.parity_reference import compute_in_float64
from components.protocol.errors import ConfigError
from components.training.evaluation import SignedLogProbability
from components.training.harness import TaskScores
from components.training.mesh_lm import MeshLM
from components.training.objectives import Chunk, Vocabulary
from tests.harness import run_ranks
from tests.lm_eval_tasks import NAMES, write_tasks
from tests.tiny_models import SIZES

CONTEXT, DOCUMENTS = 64, 5
TOLERANCE = {DType.float64: 1e-9, DType.float32: 1e-5}
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single"}],
    2: [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}],
}
if not PARITY:
    MESHES = {2: MESHES[2][1:]}  # the recipe's test has one process and dp_shard=2
else:
    MESHES[2] += [{"strategy": "ddp", "dp_replicate": 2}, {"tp": 2, "sequence_parallel": True}]
    MESHES[4] = [
        {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
        {"cp": 2, "tp": 2},
        {"dp_shard": 2, "pp": 2},
        {"dp_shard": 2, "cp": 2},
        {"pp": 2, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
    ]
CASES = [(world, DType.float64, LossMethod.chunked) for world in MESHES]
if PARITY:
    CASES += [
        (world, dtype, loss)
        for world in MESHES
        for dtype in TOLERANCE
        for loss in (LossMethod.chunked, LossMethod.logits)
        if (world, dtype, loss) not in CASES
    ]


class Recorder(training.RunContext):
    """A run that keeps what it would print and report."""

    def __init__(self, cfg: EvaluateConfig, stops_after: int | None = None) -> None:
        mesh, device = distributed.build_mesh(cfg.parallelism, "cpu"), torch.device("cpu")
        rows, size = cfg.evaluation.micro_batch_size, mesh.size("dp")
        padding = data.Padding.on(device, mesh.sequence_multiple, cfg.evaluation.seq_len)
        plan = data.BatchPlan(
            global_batch_size=rows * size,
            micro_batch_size=rows,
            dp_rank=mesh.rank("dp"),
            dp_size=size,
            padding=padding,
        )
        super().__init__(mesh, device, plan=plan)
        self.lines: list[str] = []
        self.scores, self.asked, self.stops_after = TaskScores(), 0, stops_after

    def agreed_to_stop(self) -> bool:
        self.asked += 1
        return self.stops_after is not None and self.asked > self.stops_after

    def print(self, *lines: str) -> None:
        self.lines += lines

    def report_tasks(self, scores: TaskScores) -> None:
        self.scores = scores


def config(folder: Path, dtype: DType, axes: dict[str, Any], loss: LossMethod, **evaluation: Any) -> EvaluateConfig:
    return EvaluateConfig(
        model=ModelConfig(
            path=str(folder / "model"), tokenizer="bytes", dtype=dtype, compute_dtype=dtype, attention="sdpa", loss=loss
        ),
        data=DocsDataConfig(),
        parallelism=ParallelismConfig(**{"dp_shard": 1, **axes}),
        evaluation=EvaluationConfig(
            tasks=NAMES, task_path=str(folder / "tasks"), seq_len=CONTEXT, micro_batch_size=3, **evaluation
        ),
    )


def prepared(cfg: EvaluateConfig, run: Any) -> training.Prepared:
    """Prepare the model, with float64 in the parts that compute in float32 whatever their input."""
    model = models.build_on_meta(cfg.model)
    if cfg.model.dtype == DType.float64:
        compute_in_float64(model)
    return training.prepare_built(model, models.read_anatomy(model), cfg, run)


def lm_of(cfg: EvaluateConfig, run: Any, tokenizer: Any) -> MeshLM:
    from components.training.harness import _sizes

    model = prepared(cfg, run)
    model.module.eval()
    return MeshLM(model, tokenizer, *_sizes(cfg.evaluation, model, tokenizer, run), run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that mostly prefers lower-case letters, and the tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    torch.manual_seed(3)
    sizes = {**SIZES, "vocab_size": SIZES["vocab_size"] - 1, "max_position_embeddings": CONTEXT}  # uneven shards
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
        model.lm_head.weight[: ord("a")] *= 0.01
        model.lm_head.weight[ord("z") + 1 :] *= 0.01
    model.save_pretrained(folder / "model")
    write_tasks(folder / "tasks", DOCUMENTS)
    return folder


def hflm(folder: Path, dtype: DType) -> HFLM:
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    if dtype == DType.float64:
        compute_in_float64(model)
    return HFLM(pretrained=model.eval(), tokenizer=byte_tokenizer(),
                batch_size=4)  # fmt: skip


def requests_of(lm: HFLM) -> list[tuple[str, str]]:
    """Contexts and continuations of many lengths: without a context, longer than the model's, and greedy ones."""
    pairs = [("", "no context"), ("x" * 200, "y" * 30), ("space ", "at the end"), ("a", "b" * CONTEXT)]
    pairs += [("word " * (index % 9) + "end", " next" * (index % 4 + 1)) for index in range(12)]
    for index in range(5):
        context = f"{'again ' * index}{index}"
        tokens = lm.tokenizer.encode(context)
        ids = lm.model.generate(torch.tensor([tokens]), max_new_tokens=3, do_sample=False)[0]
        pairs.append((context, lm.tokenizer.decode(ids[len(tokens) :])))
    return pairs


def instances(pairs: list[tuple[str, ...]], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in pairs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[DType], SimpleNamespace]:
    """What HFLM returns, by dtype."""
    found: dict[DType, SimpleNamespace] = {}

    def of(dtype: DType) -> SimpleNamespace:
        if dtype not in found:
            lm = hflm(folder, dtype)
            pairs = requests_of(lm)
            manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
            results = lm_eval.simple_evaluate(lm, tasks=NAMES, num_fewshot=2, task_manager=manager, bootstrap_iters=0)
            found[dtype] = SimpleNamespace(
                pairs=pairs,
                scores=lm.loglikelihood(instances(pairs)),
                metrics={
                    f"{task}/{key.removesuffix(',none')}": value
                    for task, values in results["results"].items()
                    for key, value in values.items()
                    if isinstance(value, float) and key.endswith(",none")
                },
            )
        return found[dtype]

    return of


@pytest.mark.parametrize(("world", "dtype", "loss"), CASES)
def test_scores_equal_those_of_hflm(
    world: int, dtype: DType, loss: LossMethod, folder: Path, expected: Callable[[DType], SimpleNamespace]
) -> None:
    reference, tolerance = expected(dtype), TOLERANCE[dtype]
    flags = [greedy for _, greedy in reference.scores]
    assert sum(flags) >= 3
    assert not all(flags)
    assert set(reference.metrics) == {
        *("pick/acc", "pick/acc_norm", "last_word/acc", "texts/byte_perplexity", "answer/exact_match")
    }

    def body(rank: int) -> dict[str, float]:
        tokenizer, worst = byte_tokenizer(), {}
        tasks = training.load_tasks(config(folder, dtype, {}, loss, num_fewshot=2).evaluation, tokenizer)
        for axes in MESHES[world]:
            cfg = config(folder, dtype, axes, loss, num_fewshot=2)
            run = Recorder(cfg)
            lm = lm_of(cfg, run, tokenizer)
            scores = lm.loglikelihood(instances(reference.pairs))
            assert run.lines == ["tasks: 1 requests are longer than the model's context and lose their beginning"]
            assert [greedy for _, greedy in scores] == flags, axes
            worst[str(axes)] = max(
                abs(mine / wanted - 1) for (mine, _), (wanted, _) in zip(scores, reference.scores, strict=True)
            )
            lm._model.module.train()
            before = random_state()
            tasks.evaluate(lm._model, run)
            assert random_state() == before
            assert lm._model.module.training
            assert run.scores.metrics == pytest.approx(reference.metrics, rel=tolerance), axes
            assert run.scores.documents == dict.fromkeys(NAMES, DOCUMENTS)
        return worst

    results = run_ranks(world, body, timeout=400)
    assert all(result == results[0] for result in results)
    print(world, dtype, loss, results[0])
    assert max(results[0].values()) <= tolerance, results[0]


def test_stop_request_ends_the_evaluation_without_scores(folder: Path) -> None:
    def body(rank: int) -> list[int]:
        tokenizer, cfg = byte_tokenizer(), config(folder, DType.float32, {"strategy": "single"}, LossMethod.logits)
        tasks, asked = training.load_tasks(replace(cfg.evaluation, tasks=["last_word"]), tokenizer), []
        for stops_after in (0, 1, 2):
            run = Recorder(cfg, stops_after)
            run.scores = TaskScores({"old": 1.0})
            tasks.evaluate(prepared(cfg, run), run)
            assert run.scores == TaskScores()
            asked.append(run.asked)
        return asked

    assert run_ranks(1, body) == [[1, 2, 3]]


def test_task_without_its_data_is_rejected_by_all_ranks_alike(tmp_path: Path) -> None:
    task = f"task: lost\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/absent.jsonl}}\n"
    (tmp_path / "lost.yaml").write_text(task + "output_type: loglikelihood\ntest_split: train\n")
    cfg = EvaluationConfig(tasks=["lost"], task_path=str(tmp_path))

    def body(rank: int) -> list[str]:
        with pytest.raises(ConfigError) as rejected:
            training.load_tasks(cfg, byte_tokenizer())
        return rejected.value.problems

    (problem,), others = run_ranks(2, body)
    assert problem.startswith("evaluation.tasks=['lost']: cannot be loaded (FileNotFoundError: Unable to find")
    assert "absent.jsonl" in problem
    assert others == [problem]


def test_values_of_a_sharded_vocabulary_equal_those_of_the_whole() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 11, dtype=torch.float64)
    logits[:10, [2, 7]] = 5.0  # two most likely tokens, on different ranks
    targets = logits.argmax(1)
    targets[5:10], targets[10:20] = 7, 3
    targets[20] = IGNORED
    scorer = SignedLogProbability()
    whole, _ = scorer.of_chunk(Chunk(logits, targets, per_token=True, with_gradient=False))
    assert 5 <= int((whole < 0).sum()) < 20
    assert {each >= 6 for each in targets[whole > 0].tolist()} == {True, False}  # of both shards

    def body(rank: int) -> torch.Tensor:
        shard = Vocabulary(dist.group.WORLD, first=6 * rank, largest_shard=6, size=11)
        part = logits[:, :6] if rank == 0 else logits[:, 6:]
        return scorer.of_chunk(Chunk(part, targets, shard, per_token=True, with_gradient=False))[0]

    for values in run_ranks(2, body):
        torch.testing.assert_close(values, whole, rtol=1e-14, atol=0)
