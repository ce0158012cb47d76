"""From the config to samples: the held-out split, overlong samples, custom factories, and config errors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from components.config.schema.data import (
    ChatDataConfig,
    CustomDataConfig,
    DataConfig,
    DocsDataConfig,
    LabelsDataConfig,
    MixtureDataConfig,
    Overlong,
    PreferencesDataConfig,
    SftDataConfig,
    TextDataConfig,
)
from components.conversation import Prompt
from components.data.dataset import Dataset, Facts, sample_prompts
from components.data.examples import IGNORED, Example
from components.data.labels import build_scored
from components.data.loading import build_dataset
from components.data.pairs import build_pairs
from components.models.tokenizer import byte_tokenizer as bytes_with_template
from components.protocol.errors import ConfigError
from tests.unit.test_data_examples import byte_tokenizer

PLAIN = byte_tokenizer(eos="</s>")


def build(cfg: DataConfig, split: str = "train", seq_len: int = 1000) -> Dataset:
    return build_dataset(cfg, PLAIN, seq_len=seq_len, split=split)


def prompts(dataset: Dataset) -> list[str]:
    return [PLAIN.decode(example.input_ids).partition("\n")[0] for example in dataset]


def write(file: Path, pairs: list[tuple[str, str]]) -> str:
    file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    return str(file)


# Held-out split


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
def test_held_out_split_has_the_exact_size_is_disjoint_and_keeps_the_order(tmp_path, fraction):
    path = write(tmp_path / "x.jsonl", [(f"q{i}", "a") for i in range(200)])
    cfg = SftDataConfig(path=path, eval_fraction=fraction)
    train, held_out = prompts(build(cfg)), prompts(build(cfg, "eval"))
    assert len(held_out) == round(200 * fraction)
    assert sorted(train + held_out) == sorted(f"q{i}" for i in range(200))
    for split in (train, held_out):
        assert split == sorted(split, key=lambda prompt: int(prompt[1:]))


def test_held_out_rows_do_not_depend_on_the_order_of_the_file(tmp_path):
    pairs = [(f"q{i}", "a") for i in range(100)]
    before = prompts(build(SftDataConfig(path=write(tmp_path / "a.jsonl", pairs)), "eval"))
    random.Random(0).shuffle(pairs)
    after = prompts(build(SftDataConfig(path=write(tmp_path / "b.jsonl", pairs)), "eval"))
    assert len(before) == 5
    assert sorted(before) == sorted(after)


def test_equal_prompts_are_in_the_same_split(tmp_path):
    path = write(tmp_path / "x.jsonl", [(f"q{i % 40}", f"a{i}") for i in range(400)])
    cfg = SftDataConfig(path=path, eval_fraction=0.2)
    train, held_out = prompts(build(cfg)), prompts(build(cfg, "eval"))
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 400
    assert 60 <= len(held_out) <= 100


def test_metadata_of_messages_does_not_change_the_split(tmp_path):
    def held_out(name: str, **metadata) -> list[str]:
        rows = [
            {"messages": [{"role": "user", "content": f"q{i % 40}", **metadata}, {"role": "assistant", "content": "a"}]}
            for i in range(400)
        ]
        for i, row in enumerate(rows):
            row["messages"][0] |= {key: f"{value}{i}" for key, value in metadata.items()}
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prompts(build(ChatDataConfig(path=str(path), eval_fraction=0.2, cache=None), "eval"))

    assert held_out("ids.jsonl", id="m") == held_out("plain.jsonl")
    pinned = SftDataConfig(path=write(tmp_path / "x.jsonl", [(f"q{i}", "a") for i in range(40)]))
    assert prompts(build(pinned, "eval")) == ["q3", "q5"]  # as in earlier releases


def test_holding_out_samples_requires_two_different_prompts(tmp_path):
    two = SftDataConfig(path=write(tmp_path / "two.jsonl", [("p", "a"), ("q", "a")]))
    assert sorted(prompts(build(two)) + prompts(build(two, "eval"))) == ["p", "q"]
    one = SftDataConfig(path=write(tmp_path / "one.jsonl", [("p", "a")]))
    assert prompts(build(one)) == ["p"]
    with pytest.raises(ConfigError, match=r"data.eval_fraction=0.05 requires at least two different prompts"):
        build(one, "eval")
    same = SftDataConfig(path=write(tmp_path / "same.jsonl", [("p", "a"), ("p", "b")]))
    with pytest.raises(ConfigError, match=r"data.eval_fraction=0.05 requires at least two different prompts"):
        build(same)


def test_evaluation_without_held_out_samples_is_rejected(tmp_path):
    cfg = SftDataConfig(path=write(tmp_path / "x.jsonl", [("p", "a"), ("q", "a")]), eval_fraction=0)
    assert len(build(cfg)) == 2
    message = r"data.eval_fraction=0: there are no held-out samples; to evaluate, set it, data"
    with pytest.raises(ConfigError, match=message):
        build(cfg, "eval")


def test_popular_prompts_do_not_change_the_held_out_share(tmp_path):
    """Prompts with their numbers of rows, the share, and the numbers of rows that can be held out nearest to it."""
    cases = [
        ([189, *[1] * 11], 0.05, {10}),
        ([40, 30, 10, 7, 7, 6], 0.1, {10}),
        ([25, 25, 25, 25], 0.2, {25}),
        ([4] * 50, 0.05, {8, 12}),
        ([300, *[2] * 350], 0.1, {100}),
        ([150, 50], 0.75, {150}),
    ]
    for number, (sizes, fraction, nearest) in enumerate(cases):
        rows = [(f"q{prompt}", f"a{i}") for prompt, size in enumerate(sizes) for i in range(size)]
        held_out = []
        for seed in (0, 1):  # the order of the rows does not matter
            random.Random(seed).shuffle(rows)
            cfg = SftDataConfig(path=write(tmp_path / f"{number}-{seed}.jsonl", rows), eval_fraction=fraction)
            train, held = prompts(build(cfg)), prompts(build(cfg, "eval"))
            assert not set(train) & set(held)
            assert len(train) + len(held) == sum(sizes)
            assert len(held) in nearest
            held_out.append(sorted(held))
        assert held_out[0] == held_out[1]


def build_popular(tokenizer, seq_len, split) -> list[Example]:
    return [Example([1 if i < 90 else i, 5, 6], [IGNORED, 5, 6]) for i in range(100)]


def test_popular_prompts_of_every_kind_of_data(tmp_path):
    rows = []
    for i in range(100):
        prompt = "popular" if i < 90 else f"q{i}"
        message, answers = {"role": "user", "content": prompt}, {"chosen": f"c{i}", "rejected": f"r{i}"}
        messages = [message, {"role": "assistant", "content": f"a{i}"}]
        rows.append({"prompt": prompt, "response": f"a{i}", "messages": messages, "label": i % 2, **answers})
    path = str(tmp_path / "x.jsonl")
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = SftDataConfig(path=path)
    configs = [
        (build_dataset, one),
        (build_dataset, ChatDataConfig(path=path)),
        (build_dataset, TextDataConfig(path=path, text_column="prompt")),
        (build_dataset, custom("build_popular")),
        (build_dataset, MixtureDataConfig(sources={"one": one})),
        (build_pairs, PreferencesDataConfig(path=path)),
        (build_pairs, PreferencesDataConfig(path=path, label_column="label")),
        (build_scored, LabelsDataConfig(path=path, text_column="prompt", num_labels=2)),
    ]
    tokenizer = bytes_with_template()
    for read, cfg in configs:
        sizes = [len(read(cfg, tokenizer, seq_len=64, split=split)) for split in ("train", "eval")]
        assert sizes == [95, 5]


def test_share_that_groups_of_equal_prompts_do_not_allow_is_rejected_with_one_that_they_allow(tmp_path):
    path = write(tmp_path / "x.jsonl", [("pq"[i >= 120], f"a{i}") for i in range(200)])
    cfg = SftDataConfig(path=path)
    for split in ("train", "eval"):
        with pytest.raises(ConfigError) as error:
            build(cfg, split)
        assert str(error.value) == (
            f"data.eval_fraction=0.05: would hold out 10 of 200 samples of {path} (train), but samples with equal "
            "prompts stay in one split, and the largest of 2 such groups has 120 samples; the nearest possible number "
            "is 80; set data.eval_fraction=0.4, or data.eval_split or data.eval_path"
        )
    assert len(build(SftDataConfig(path=path, eval_fraction=0.4), "eval")) == 80
    with pytest.raises(ConfigError, match=r"the largest of 2 such groups .*; set data.sources.one.eval_fraction=0.4"):
        build(MixtureDataConfig(sources={"one": cfg}))


def test_sample_limits_keep_the_first_samples_of_each_split_independently(tmp_path):
    path = write(tmp_path / "x.jsonl", [(f"q{i}", "a") for i in range(100)])
    everything = SftDataConfig(path=path, eval_fraction=0.2)
    limited = SftDataConfig(path=path, eval_fraction=0.2, max_samples=7, max_eval_samples=3)
    assert prompts(build(limited)) == prompts(build(everything))[:7]
    assert prompts(build(limited, "eval")) == prompts(build(everything, "eval"))[:3]


def test_eval_path_is_the_held_out_split(tmp_path):
    path = write(tmp_path / "train.jsonl", [(f"q{i}", "a") for i in range(30)])
    cfg = SftDataConfig(path=path, eval_path=write(tmp_path / "held.jsonl", [("h", "a")]))
    assert len(build(cfg)) == 30
    assert prompts(build(cfg, "eval")) == ["h"]
    assert str(build(cfg, "eval").facts).startswith(f"{tmp_path}/held.jsonl (train): 1 sample, ")


# Overlong samples. In tokens: "p\n" is 2, the answer its length, and the end 1.


def overlong_config(tmp_path: Path, **values) -> SftDataConfig:
    path = write(tmp_path / "x.jsonl", [("p", "a" * 5), ("p" * 7, "a" * 10), ("p" * 10, "a"), ("p" * 11, "a")])
    return SftDataConfig(path=path, eval_fraction=0, **values)


def test_overlong_samples_are_truncated_on_the_right_and_counted(tmp_path):
    dataset = build(overlong_config(tmp_path), seq_len=11)
    assert [PLAIN.decode(example.input_ids) for example in dataset] == [
        "p\naaaaa</s>",
        "ppppppp\naaa",
        # the third and fourth have no answer left: the prompt fills the row
    ]
    assert dataset[1].labels == [IGNORED] * 8 + dataset[1].input_ids[8:]
    facts = dataset.facts
    assert (facts.samples, facts.tokens, facts.target_tokens) == (2, 19, 9)
    assert (facts.truncated, facts.dropped_without_target, facts.dropped_overlong) == (1, 2, 0)
    assert str(facts).startswith(
        f"{tmp_path}/x.jsonl (train): 2 samples, 19 tokens, 9 with loss; 1 cut to seq_len; 2 without a target dropped"
    )
    assert facts.warning == (
        f"2 of 4 rows of {tmp_path}/x.jsonl (train) are dropped (50%): 2 without a target; raise training.seq_len "
        "(in evaluate.py evaluation.seq_len)"
    )
    facts.samples = 18
    assert "(10%)" in facts.warning
    facts.samples = 19
    assert facts.warning == ""


def test_overlong_samples_are_dropped_or_rejected(tmp_path):
    dataset = build(overlong_config(tmp_path, overlong=Overlong.drop), seq_len=13)
    assert prompts(dataset) == ["p", "p" * 10]
    assert dataset.facts.dropped_overlong == 2
    assert len(build(overlong_config(tmp_path, overlong=Overlong.refuse), seq_len=19)) == 4
    with pytest.raises(ConfigError) as caught:
        build(overlong_config(tmp_path, overlong=Overlong.refuse), seq_len=18)
    assert caught.value.problems == [
        f"data.overlong=refuse: a sample of {tmp_path}/x.jsonl (train) has 19 tokens, more than "
        "seq_len=18; raise training.seq_len (in evaluate.py evaluation.seq_len), or set data.overlong to "
        "truncate or drop; the sample begins 'ppppppp\\naaaaaaaaaa</s>'"
    ]


@pytest.mark.parametrize("overlong", [Overlong.truncate, Overlong.drop])
def test_seq_len_too_short_for_every_sample_is_rejected(tmp_path, overlong):
    cfg = overlong_config(tmp_path, overlong=overlong)
    with pytest.raises(ConfigError, match=r"seq_len=2: too short for every sample .*; raise training.seq_len \("):
        build(cfg, seq_len=2)


# Dataset


def test_dataset_is_a_sequence():
    dataset = build(DocsDataConfig(max_samples=20), seq_len=200)
    assert len(dataset) == 20
    assert dataset[-1] == dataset[19]
    assert dataset[3:6] == [dataset[3], dataset[4], dataset[5]]
    assert list(dataset) == [dataset[i] for i in range(20)]
    for bad in (20, -21):
        with pytest.raises(IndexError, match=f"sample {bad} of 20"):
            dataset[bad]
    tokens = sum(len(example.input_ids) for example in dataset)
    targets = sum(label != IGNORED for example in dataset for label in example.labels)
    assert (dataset.facts.tokens, dataset.facts.target_tokens) == (tokens, targets)
    assert dataset.show(0).startswith("What does `abc.ABC` do?")
    assert dataset.show(0).endswith("</s>]]")


def test_fingerprint_depends_only_on_the_samples(tmp_path):
    rows = [("p1", "a1"), ("p2", "a2"), ("p3", "a3")]

    def fingerprint(name: str, *rows: tuple[str, str], seq_len: int = 50) -> str:
        path = write(tmp_path / name, list(rows))
        return build(SftDataConfig(path=path, eval_fraction=0), seq_len=seq_len).fingerprint

    same = fingerprint("x.jsonl", *rows)
    assert fingerprint("y.jsonl", *rows) == same
    others = {
        "order": fingerprint("x.jsonl", *reversed(rows)),
        "answer": fingerprint("x.jsonl", ("p1", "a0"), *rows[1:]),
        "prompt": fingerprint("x.jsonl", ("p0", "a1"), *rows[1:]),
        "length": fingerprint("x.jsonl", *rows, seq_len=4),
        "number": fingerprint("x.jsonl", *rows[:2]),
    }
    assert len({same, *others.values()}) == 6
    samples = [
        [Example([1, 2, 3], [IGNORED, 2, 3])],
        [Example([1, 2, 3], [IGNORED, IGNORED, 3])],
        [Example([1, 2], [IGNORED, 2]), Example([3], [3])],
    ]
    facts = [Facts(source="here") for _ in samples]
    made = [Dataset(each, PLAIN, facts=fact, seq_len=9) for each, fact in zip(samples, facts, strict=True)]
    assert len({dataset.fingerprint for dataset in made}) == 3


def test_sample_prompts_are_spread_evenly_over_the_prompts_of_the_split(tmp_path):
    path = write(tmp_path / "x.jsonl", [(f"q{i}", "a") for i in range(60)])
    cfg = SftDataConfig(path=path, eval_fraction=0.2, system_prompt="s")
    held_out = build(cfg, "eval")
    lines = [PLAIN.decode(example.input_ids).split("\n") for example in held_out]
    questions = [Prompt(question, PLAIN.encode(f"{system}\n{question}\n")) for system, question, _ in lines]
    assert [len(questions), lines[0][0]] == [12, "s"]
    assert sample_prompts(held_out, 12) == questions
    assert sample_prompts(held_out, 3) == questions[::4]
    assert sample_prompts(held_out, 100) == questions
    assert sample_prompts(held_out, 0) == []
    assert sample_prompts(build(custom("build_examples")), 2) == []


# Custom factories


def build_examples(tokenizer, seq_len: int, split: str) -> list[Example]:
    """Minimal function for data.factory."""
    count = {"train": 40, "held": 4, "short": 1}.get(split, 0)
    return [Example([i + 10, 5, 6, 7], [IGNORED, 5, 6, IGNORED]) for i in range(count)]


def build_documents(tokenizer, seq_len: int, split: str) -> list[Example]:
    """Return samples of which every token is a target, as in language modeling."""
    count = {"train": 40, "one": 1}[split]
    return [Example([5, i + 10, 6], [5 if i % 2 else IGNORED, i + 10, 6]) for i in range(count)]


NOT_A_FUNCTION = 3


def build_misaligned(tokenizer, seq_len: int, split: str) -> list[Example]:
    return [Example([1, 2], [1, 2]), Example([1, 2, 3], [1, 2])]


def build_out_of_range(tokenizer, seq_len: int, split: str) -> list[Example]:
    """Return a valid sample and an invalid one: an input id or a label out of range for the 263 tokens of PLAIN."""
    ids, labels = [1, 2, 262], [IGNORED, 2, 262]
    invalid = {"id": ([1, 263, 262], labels), "below": ([1, 2, -100], labels)}
    invalid |= {"label": (ids, [IGNORED, 2, 263]), "foreign": (ids, [-1, -1, 262])}
    return [Example(ids, labels), Example(*invalid[split])]


def custom(function: str, **values) -> CustomDataConfig:
    return CustomDataConfig(factory=f"{__name__}:{function}", **values)


def out_of_range(split: str) -> CustomDataConfig:
    return custom("build_out_of_range", split=split)


def test_custom_factory_returns_the_samples_of_each_split():
    assert build(custom("build_examples", eval_split="held"), "eval")[3] == ([13, 5, 6], [IGNORED, 5, 6])
    cfg = custom("build_examples", eval_fraction=0.1)
    train, held_out = build(cfg), build(cfg, "eval")
    assert (len(train), len(held_out)) == (36, 4)
    assert sorted(example.input_ids[0] for example in [*train, *held_out]) == list(range(10, 50))
    assert build(custom("build_examples", eval_fraction=0), seq_len=2)[0] == ([10, 5], [IGNORED, 5])


def test_custom_samples_without_a_prompt_are_held_out_by_their_tokens():
    cfg = custom("build_documents", eval_fraction=0.1)
    train, held_out = build(cfg), build(cfg, "eval")
    assert (len(train), len(held_out)) == (36, 4)
    with pytest.raises(ConfigError, match=r"add samples, or set data.eval_split \(such as eval, which calls"):
        build(custom("build_documents", split="one"), "eval")


@pytest.mark.parametrize(
    ("cfg", "problem"),
    [
        (custom("no_such"), r"data.factory=.*:no_such: cannot be imported: .*no_such"),
        (CustomDataConfig(factory="no_such_module:f"), "cannot be imported: No module named 'no_such_module'"),
        (custom("NOT_A_FUNCTION"), "is a int, not a function"),
        (custom("build_misaligned"), "sample 1 has 3 input_ids and 2 labels; labels must be aligned with input_ids"),
        (custom("build_examples", split="none"), r"build_examples \(none\): has no rows; set data.factory or"),
        (out_of_range("id"), r"data.factory=\S+: sample 1 has 263 among its input_ids; .* below 263,"),
        (out_of_range("below"), "sample 1 has -100 among its input_ids; must be at least 0 and below"),
        (out_of_range("label"), r"sample 1 has 263 among its labels; must be -100 \(ignored\), or at least 0"),
        (out_of_range("foreign"), r"sample 1 has -1 among its labels; must be -100 \(ignored"),
    ],
)
def test_invalid_custom_factory_is_rejected(cfg, problem):
    with pytest.raises(ConfigError, match=problem):
        build(cfg)


# Config errors


def errors_of(schema: type[DataConfig], **values: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        schema(**values)
    return caught.value.problems


def test_all_config_errors_of_the_section_are_reported_at_once():
    sizes = {"eval_fraction": 1.0, "max_samples": 0, "max_eval_samples": -1}
    columns = {"prompt_column": "text", "response_column": "text", "input_column": ""}
    assert errors_of(SftDataConfig, path="", **sizes, **columns) == [
        "data.max_samples=0: must be at least 1",
        "data.max_eval_samples=-1: must be at least 1",
        "data.eval_fraction=1.0: must be at least 0 (nothing held out) and less than 1",
        "data.path='': is empty; set data.path to a file, a folder or a hub name",
        "data.input_column='': is empty; name it as in the data",
        "data.response_column=text: is also data.prompt_column; the two must differ",
    ]


def test_evaluation_on_the_train_split_is_rejected():
    (problem,) = errors_of(SftDataConfig, path="x.jsonl", eval_split="train")
    assert problem.startswith("data.eval_split=train: is also the train split, data.split; choose another, or null")
    SftDataConfig(path="x.jsonl", eval_split="train", eval_path="y.jsonl")


def test_equal_roles_or_keys_are_rejected():
    assert errors_of(ChatDataConfig, path="x.jsonl", role_key="content", user_role="assistant") == [
        "data.content_key=content: is also data.role_key; the two must differ",
        "data.assistant_role=assistant: is also data.user_role; the two must differ",
    ]


@pytest.mark.parametrize(
    "factory", ["my_module", "my_module:", ":build", "my module:build", "a..b:build", "a:b:c", "../a:b"]
)
def test_factory_that_is_not_module_and_function_is_rejected(factory):
    assert errors_of(CustomDataConfig, factory=factory) == [
        f"data.factory={factory}: must be module:function, such as my_package.my_data:build"
    ]
