"""recipes/classify.py end to end: resumed on another mesh, and exports that transformers, PEFT and score.py load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from components.models.tokenizer import byte_tokenizer
from scripts.score import main as score
from tests.recipes.launching import EXIT_AFTER_SAVE, RECIPES, TWO, Bench
from tests.recipes.small_jobs import write_rows

BASE = "smollm2_135m_hub"
"""Option without a shape of its own; its path is replaced by that of the base model."""
SHORT = (
    *("model.path=base", "model.revision=null", "model.dtype=float32", "model.compute_dtype=float32"),
    *("training.max_steps=4", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.seq_len=64", "training.eval_every=2", "checkpoint.every=2", "logging.plot=false"),
    *("cluster.device=cpu", "optimizer.lr=1e-2"),
)


@pytest.fixture
def classify(bench: Bench) -> Bench:
    """A folder with a copy of the recipe, labeled texts, pairs, and a causal LM whose LM head the recipe replaces."""
    bench.copy("classify.py")
    rows = [
        {"text": f"{('ham', 'spam')[i % 2]} {i} " + "abc " * (i % 5), "label": ("a", "b")[i % 2]} for i in range(40)
    ]
    write_rows(bench.folder / "train.jsonl", rows[:30])
    write_rows(bench.folder / "test.jsonl", rows[30:])
    pairs = [{"prompt": f"question {i}", "chosen": "yes " * (1 + i % 3), "rejected": "no"} for i in range(30)]
    write_rows(bench.folder / "pairs.jsonl", pairs)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=264, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(bench.folder / "base")
    byte_tokenizer().save_pretrained(bench.folder / "base")
    return bench


@torch.no_grad()
def test_run_resumes_on_another_mesh_and_transformers_loads_its_export(classify: Bench) -> None:
    classify.copy("classify.py", EXIT_AFTER_SAVE)
    labels = ("data.path=train.jsonl", "data.eval_path=test.jsonl", "data.label_names=[a,b]", "run.dir=run")
    begun = classify.start(*SHORT, *labels, "parallelism=single", model=BASE).wait()
    assert begun.status == 9, begun.errors
    classify.copy("classify.py")
    resumed = classify.complete(*SHORT, *labels, "parallelism=tp2", TWO, model=BASE)
    assert "resumed from" in resumed.output

    export = classify.folder / "run" / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert model.config.id2label == {0: "a", 1: "b"}
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    rows = [json.loads(line) for line in (classify.folder / "test.jsonl").read_text().splitlines()]
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    last = classify.lines("run", "eval_loss")[-1]
    assert last["eval_loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert last["eval_accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item())


def check_scored_by_transformers(export: Path, pairs: Path, rewards: list[dict[str, float]]) -> None:
    """The export and its own chat template give the same rewards in a padded batch and in a pipeline."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    chats, expected = [], []
    for row, reward in zip(map(json.loads, pairs.read_text().splitlines()), rewards, strict=True):
        for key in ("chosen", "rejected"):
            chats.append([{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}])
            expected.append(reward[key])
    batch = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
    assert model.eval()(**batch).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    classifier = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    scored = classifier(texts, batch_size=8, add_special_tokens=False)
    assert [each["score"] for each in scored] == pytest.approx(expected, abs=1e-6)


def check_rejected_by_score(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder or device that does not exist, and a bad row, after which the corrected command is accepted."""
    rows = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:2]
    (folder / "bad.jsonl").write_text("".join([rows[0], '{"prompt": "a"}\n', rows[1]]))
    for arguments, message in (
        (["bad.jsonl", "--out", "absent/x.jsonl"], "no folder"),
        (["bad.jsonl", "--device", "cuda:77"], "--device cuda:77: cannot be used: "),
        (["bad.jsonl"], "1 row is no pair; correct or remove such rows:\n"),
        (["bad.jsonl"], "1 row is no pair; correct or remove such rows:\n"),
    ):
        paths = [str(folder / each) if each.endswith(".jsonl") else each for each in arguments]
        assert score([model, *paths]) == 2
        errors = capsys.readouterr().err
        assert message in errors
        assert "bad_rows" not in errors  # a key of recipes only


@torch.no_grad()
def test_reward_model_with_adapters_is_loaded_by_peft_and_scores_pairs(
    classify: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = ("objective=reward", "data=preferences", "data.path=pairs.jsonl", "data.eval_path=pairs.jsonl")
    adapters = ("peft=lora", "peft.export=both", "parallelism=single", "run.dir=run")
    done = classify.complete(*SHORT, *pairs, *adapters, model=BASE)
    run = classify.folder / "run"
    last = classify.lines("run", "eval_loss")[-1]
    counted = classify.lines("run", "loss")[0]["tokens"]
    assert counted > 2 * 8 * 4  # all tokens of the answers of a step, not one of each
    assert "input tokens/s" in done.output

    command = [sys.executable, str(RECIPES.parent / "scripts" / "score.py"), str(run / "export"), "pairs.jsonl"]
    scored = subprocess.run(command, cwd=classify.folder, capture_output=True, text=True, check=False)
    assert scored.returncode == 0, scored.stderr
    assert f"30 pairs, accuracy {last['eval_accuracy']:.2%}" in scored.stdout
    written = classify.folder / "outputs" / "score" / "pairs.rewards.jsonl"  # not beside the data
    rewards = [json.loads(line) for line in written.read_text().splitlines()]
    margins = torch.tensor([line["chosen"] - line["rejected"] for line in rewards], dtype=torch.float64)
    assert last["eval_margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert last["eval_loss"] == pytest.approx(-F.logsigmoid(margins).mean().item(), rel=1e-4)

    check_rejected_by_score(str(run / "export"), classify.folder, capsys)

    again = [sys.executable, str(RECIPES.parent / "scripts" / "export.py"), "run", "--out", "again"]
    exported = subprocess.run(again, cwd=classify.folder, capture_output=True, text=True, check=False)
    assert exported.returncode == 0, exported.stderr
    ours, theirs = (load_file(each / "model.safetensors") for each in (run / "export", classify.folder / "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    check_scored_by_transformers(run / "export", classify.folder / "pairs.jsonl", rewards)

    merged = AutoModelForSequenceClassification.from_pretrained(run / "export").eval()
    base = AutoModelForSequenceClassification.from_pretrained(classify.folder / "base", num_labels=1)
    adapted = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    ids = torch.arange(20).view(1, 20)
    torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
