"""Rows of token stores: every token is a target once, masks as in packing, held-out rows, cursor and cost at scale."""

from __future__ import annotations

import json
import resource
import time
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.batch import Batch
from components.config.schema.data import MixtureDataConfig, TokensDataConfig
from components.data.batches import BatchPlan, EvalBatches, TrainBatches, collate
from components.data.examples import IGNORED, Example, PackedRow
from components.data.loading import build_dataset
from components.data.token_store.manifest import (
    _HASH_OF_BYTES,
    Manifest,
    Vocabulary,
    hash_of_tokenizer,
    read_manifest,
    shard_problems,
    write_manifest,
)
from components.data.token_store.rows import RowSelection, StoreSplit, TokenRows
from components.data.token_store.writer import index_folder, write_shard
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.training.routers import sequence_weights
from tests.unit.token_shards import (
    EOS,
    documents_of,
    flat,
    manifest_of,
    scanned,
    sparse_store,
    store_of,
    write_datatrove,
)

TOKENIZER = byte_tokenizer()
SHARDS = [documents_of(1, 40), documents_of(2, 1), documents_of(3, 90)]
SEQ = 64


def rows_of(manifest: Manifest, **values: Any) -> TokenRows:
    return TokenRows(manifest, TOKENIZER, source="store", **{"seq_len": SEQ, **values})


def batch_of(rows: TokenRows, indices: Any) -> Batch:
    plan = BatchPlan(global_batch_size=1, micro_batch_size=1)
    return collate([rows[index] for index in indices], plan.padding.of(rows))


def bounds_of(batch: Batch) -> torch.Tensor:
    assert batch.document_bounds is not None
    return batch.document_bounds


def pairs(ids: list[int], ends: set[int]) -> list[tuple[int, int]]:
    """Return (token, next token) of a shard, without those whose next token begins another document."""
    return [(ids[i], ids[i + 1]) for i in range(len(ids) - 1) if i + 1 not in ends]


@pytest.mark.parametrize("pack", [True, False])
def test_every_token_is_a_target_once_and_documents_are_those_of_the_shard(pack: bool, tmp_path: Path) -> None:
    rows = rows_of(store_of(tmp_path, SHARDS), pack=pack)
    expected = []
    for documents in SHARDS:
        ends = np.cumsum([len(each) for each in documents]).tolist() if pack else []
        expected += pairs(flat(documents), set(ends))
    found = []
    for index in range(len(rows)):
        batch = batch_of(rows, [index])
        kept = batch.targets != IGNORED
        found += list(zip(batch.input_ids[kept].tolist(), batch.targets[kept].tolist(), strict=True))
        assert batch.target_count == kept.sum()
        if pack:
            bounds, row = bounds_of(batch)[0].tolist(), rows[index]
            assert bounds[: len(row.ends) + 1] == [0, *row.ends]
            starts = torch.tensor([0, *row.ends[:-1]])
            assert (batch.position_ids[0, starts] == 0).all()  # type: ignore[index]
    assert found == expected
    assert rows.facts.store_tokens == sum(len(flat(documents)) for documents in SHARDS)
    assert max(len(rows[index].ends) for index in range(len(rows))) <= rows.facts.max_documents or not pack


def masked_folder(folder: Path, form: str) -> tuple[list[list[int]], np.ndarray]:
    """Write documents with a random loss mask as another program does; return them and the mask (tokens,)."""
    folder.mkdir()
    documents = documents_of(11, 80)
    ids = np.asarray(flat(documents), np.uint16)
    mask = np.random.default_rng(12).random(len(ids)) < 0.4
    if form == "datatrove":
        write_datatrove(folder / "a.ds", documents, 2)
        mask.tofile(folder / "a.ds.loss")
    elif form == "numpy":
        np.save(folder / "input_ids.npy", ids)
        np.save(folder / "label_mask.npy", mask)
    elif form == "meshbook":
        bounds = np.cumsum([0, *map(len, documents)])
        labels = np.where(mask, ids.astype(np.int64), IGNORED).tolist()
        samples = [
            Example(flat([each]), labels[begin:][: len(each)]) for each, begin in zip(documents, bounds, strict=False)
        ]
        write_shard(folder / "a.safetensors", [samples[:30], [], samples[30:]], 2, {})
    else:
        ids.tofile(folder / "token_ids_part_0000.npy")
        mask.tofile(folder / "labels_mask_part_0000.npy")
        (folder / "token_ids_part_0000.csv.gz").write_bytes(b"")  # which is not read: documents end with EOS
    return documents, mask


def indexed(folder: Path) -> Manifest:
    index_folder(folder, TOKENIZER, document_end=EOS)
    return read_manifest(str(folder))


@pytest.mark.parametrize("form", ["olmo", "numpy", "datatrove", "meshbook"])
def test_loss_mask_selects_the_targets(form: str, tmp_path: Path) -> None:
    """The reference is OLMo-core's rule: the label of a token is ignored unless its mask is set, then labels shift."""
    documents, mask = masked_folder(tmp_path / "store", form)
    manifest = indexed(tmp_path / "store")
    assert len(manifest.shards) == 1
    assert shard_problems(manifest, "data.path=x") == []
    rows = rows_of(manifest, seq_len=16)
    ids, first = np.asarray(flat(documents)), np.zeros(len(mask), bool)
    first[np.cumsum([0, *map(len, documents)])[:-1]] = True  # no token predicts the first one of a document
    expected = np.where(mask & ~first, ids, IGNORED)[1:]
    batch = batch_of(rows, range(len(rows)))
    targets = batch.targets.reshape(-1)[: len(expected)].numpy()
    inputs = batch.input_ids.reshape(-1)[: len(expected)].numpy()
    assert np.array_equal(inputs, ids[:-1])
    assert np.array_equal(targets, expected)
    assert "a loss mask selects the targets" in str(rows.facts)
    stored = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert stored["version"] == 2  # a reader of version 1 would train on all tokens


@pytest.mark.parametrize("form", ["olmo", "datatrove"])
def test_store_of_links_finds_the_files_next_to_the_links(form: str, tmp_path: Path) -> None:
    """A cache of the hub holds links to files that are named after their hashes."""
    masked_folder(tmp_path / "store", form)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted((tmp_path / "store").iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    manifest = indexed(tmp_path / "store")
    assert shard_problems(manifest, "data.path=x") == []
    assert len(rows_of(manifest, seq_len=16)[0].input_ids) == 16


def test_store_with_another_loss_mask_has_another_fingerprint(tmp_path: Path) -> None:
    def fingerprint(name: str, flip: int | None) -> str:
        masked_folder(tmp_path / name, "olmo")
        file = tmp_path / name / "labels_mask_part_0000.npy"
        mask = np.fromfile(file, bool)
        if flip is not None:
            mask[flip] ^= True
        mask.tofile(file)
        return rows_of(indexed(tmp_path / name), seq_len=16).fingerprint

    assert fingerprint("a", None) == fingerprint("b", None) != fingerprint("c", 3)


@pytest.mark.parametrize("form", ["olmo", "numpy", "datatrove"])
def test_loss_mask_that_is_lost_or_changed_is_reported(form: str, tmp_path: Path) -> None:
    masked_folder(tmp_path / "store", form)
    manifest = indexed(tmp_path / "store")
    (file,) = (each for each in (tmp_path / "store").iterdir() if "mask" in each.name or each.suffix == ".loss")
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file.name}: token shard damaged"):
        rows_of(manifest, seq_len=16)[0]
    file.write_bytes(content[:-3])
    with pytest.raises((ConfigError, ValueError), match=f"{file.name}.*(has|truncated)"):
        index_folder(tmp_path / "store", TOKENIZER, document_end=EOS, id_bytes=2)
    file.unlink()
    assert f"such as {file} (No such file or directory)" in str(shard_problems(manifest, "data.path=x"))
    with pytest.raises(ConfigError, match="the loss mask of the manifest is missing"):
        rows_of(manifest, seq_len=16)[0]


def test_rows_without_stored_ends_use_the_end_token(tmp_path: Path) -> None:
    np.asarray(flat(SHARDS[0]), np.uint16).tofile(tmp_path / "a.bin")
    raw = rows_of(manifest_of([scanned(tmp_path / "a.bin")], tmp_path))
    stored = rows_of(store_of(tmp_path / "own", SHARDS[:1]))
    assert list(raw) == list(stored)
    one = rows_of(manifest_of([scanned(tmp_path / "a.bin", document_end=None)], tmp_path, document_end=None))
    assert all(row.ends == [len(row.input_ids)] for row in one)


def test_router_weights_count_the_target_after_the_row(tmp_path: Path) -> None:
    rows = rows_of(store_of(tmp_path, SHARDS))
    batch = batch_of(rows, range(len(rows)))
    assert (batch.targets[:, -1] != IGNORED).any()
    weights = sequence_weights(batch.targets, batch.document_bounds)
    assert weights[..., 0].sum() == (batch.targets != IGNORED).sum()


def test_shorter_rows_of_a_length_ramp_keep_every_target(tmp_path: Path) -> None:
    for pack in (True, False):
        batch = batch_of(rows_of(store_of(tmp_path, SHARDS), pack=pack), range(4))
        assert (batch.cut_rows(16).targets != IGNORED).sum() == (batch.targets != IGNORED).sum()


@pytest.mark.parametrize("fraction", ["0", "0.001", "0.01", "0.05", "0.3", "0.5", "0.9"])
def test_train_and_held_out_rows_are_a_partition(fraction: str) -> None:
    for rows in (0, 1, 2, 3, 10, 15, 16, 17, 100, 333, 1000):
        train, held_out = (RowSelection(rows, Fraction(fraction), is_eval) for is_eval in (False, True))
        selected = [[split.at(index) for index in range(len(split))] for split in (train, held_out)]
        assert sorted(selected[0] + selected[1]) == list(range(rows))
        assert all(indices == sorted(indices) for indices in selected)
        assert len(held_out) >= (fraction != "0" and rows > 0)
        if rows >= 100:
            assert abs(len(held_out) - rows * float(fraction)) <= 16
        assert len(held_out) >= int(rows * Fraction(fraction)) / 2


def count_epoch(folder: Path, results: Any) -> None:
    """Report what a rank needs for 2,000 sparse shards, and whether an epoch of a smaller store has each row once."""
    manifest_file = folder / "big"
    before, began = peak_mib(), time.perf_counter()
    rows = TokenRows(
        read_manifest(str(manifest_file)), TOKENIZER, source="", seq_len=SEQ, split=StoreSplit(0.001), blocks=(256, 256)
    )  # fmt: skip
    batches = TrainBatches(rows, BatchPlan(global_batch_size=8, micro_batch_size=8), seed=1)
    took = time.perf_counter() - began
    grown = peak_mib() - before
    began = time.perf_counter()
    row = rows[rows.order(1).at(10**12)]
    at = time.perf_counter() - began
    results.put((took, grown, at, len(rows), len(row.input_ids), next(batches)[0].input_ids.shape))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_two_thousand_shards_of_a_billion_rows_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2e12 rows, 1.28e14 virtual tokens (2.6e14 bytes of sparse files)."""
    monkeypatch.setattr("components.data.token_store.shards.VerifiedFile", lambda file, *where: file)
    write_manifest(sparse_store(tmp_path / "big", 2000, 10**9, SEQ))
    context = get_context("fork")
    results = context.Queue()
    process = context.Process(target=count_epoch, args=(tmp_path, results))
    process.start()
    took, grown, at, length, tokens, shape = results.get(timeout=60)
    process.join()
    print(f"start {took:.3f} s, {grown:.1f} MiB; row at position 1e12: {1e3 * at:.3f} ms")
    assert length == 1_998_000_000_000
    assert (tokens, tuple(shape)) == (SEQ, (8, SEQ))
    assert took < 1 * LOADED
    assert grown < 300
    assert at < 1e-3 * LOADED


LOADED = 20
"""Factor on limits of wall time: other processes use the cores too."""


def test_an_epoch_reads_each_row_once_on_ranks_that_change(tmp_path: Path) -> None:
    """Ranks are stopped at steps 7 and 19 and go on as another number of ranks, until the epoch ends."""
    shards = [[[256 * number + position for position in range(250)]] for number in range(40)]  # each id occurs once
    manifest = store_of(tmp_path, shards)
    used, state, step = list[int](), None, 0
    for dp, until in ((1, 7), (4, 19), (2, 10**9)):
        datasets = [rows_of(manifest, blocks=(4, 3), seq_len=10) for _ in range(dp)]
        ranks = [
            TrainBatches(
                dataset, BatchPlan(global_batch_size=8, micro_batch_size=2, dp_rank=rank, dp_size=dp), seed=3,
                fingerprint=dataset.fingerprint,
            )
            for rank, dataset in enumerate(datasets)
        ]  # fmt: skip
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        while step < min(until, len(datasets[0]) // 8):
            for rank in ranks:
                used += [int(first) for batch in next(rank) for first in batch.input_ids[:, 0]]
            step += 1
        state = ranks[0].state_dict()
    assert len(used) == 40 * 25
    assert sorted(used) == sorted(256 * number + 10 * row for number in range(40) for row in range(25))
    order = rows_of(manifest, blocks=(4, 3), seq_len=10).order(3).indices(0, len(used))
    assert used == [256 * (row // 25) + 10 * (row % 25) for row in order]


def test_resume_with_another_store_or_block_size_is_rejected(tmp_path: Path) -> None:
    first = rows_of(store_of(tmp_path / "a", SHARDS))
    changed = store_of(tmp_path / "b", [SHARDS[0], SHARDS[1], documents_of(3, 90, ids=255)])
    plan = BatchPlan(global_batch_size=1, micro_batch_size=1)
    state = TrainBatches(first, plan, seed=1, fingerprint=first.fingerprint).state_dict()
    moved = store_of(tmp_path / "c", SHARDS)
    assert rows_of(moved).fingerprint == first.fingerprint
    for other in (rows_of(changed), rows_of(moved, blocks=(2, 1)), rows_of(moved, pack=False)):
        with pytest.raises(ConfigError, match="samples differ from the"):
            TrainBatches(other, plan, seed=1, fingerprint=other.fingerprint).load_state_dict(state)


def config(folder: Path, **values: Any) -> TokensDataConfig:
    return TokensDataConfig(**{"path": str(folder), "pack": True, "eval_fraction": 0.1, **values})


def selected(cfg: TokensDataConfig | MixtureDataConfig, split: str = "train") -> Any:
    return build_dataset(cfg, TOKENIZER, seq_len=SEQ, split=split)


def written(folder: Path, seed: int = 1, **values: Any) -> Path:
    write_manifest(store_of(folder, [documents_of(seed, 200), documents_of(seed + 1, 100)], **values))
    return folder


def test_config_selects_train_and_held_out_rows(tmp_path: Path) -> None:
    cfg = config(written(tmp_path / "a"), max_samples=50, max_eval_samples=3)
    train, held_out = (selected(cfg, split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (50, 3)
    assert not {tuple(row.input_ids) for row in train} & {tuple(row.input_ids) for row in held_out}
    assert "2 shards" in str(train.facts)
    assert f"held out of {tmp_path / 'a'}" in str(held_out.facts)
    assert held_out.prompts
    assert train.show(0).count("[[") >= 1
    other = written(tmp_path / "b", 7)
    separate = config(tmp_path / "a", eval_path=str(other))
    whole = selected(separate)
    assert len(whole) == len(rows_of(read_manifest(str(tmp_path / "a"))))
    assert list(selected(separate, "eval")) == list(rows_of(read_manifest(str(other))))


def test_mixture_of_stores_has_its_shares_and_reads_each_row_once_per_epoch(tmp_path: Path) -> None:
    sources = {
        name: config(written(tmp_path / name, seed), weight=weight)
        for name, seed, weight in (("a", 1, 0.25), ("b", 5, 0.75))
    }
    cfg = MixtureDataConfig(sources=sources, pack=True)
    mixture = selected(cfg)
    sizes = [len(selected(each)) for each in sources.values()]
    assert len(mixture) == sum(sizes)
    batches = TrainBatches(mixture, BatchPlan(global_batch_size=4, micro_batch_size=4), seed=1)
    rows = [index for step in range(sizes[1] // 3) for index in batches.global_batch(step)]
    second = [index for index in rows if index >= sizes[0]]
    assert abs(len(second) - 0.75 * len(rows)) <= 1
    assert len(set(second)) == len(second)
    assert next(batches)[0].document_bounds is not None
    held_out = selected(cfg, "eval")
    assert len(list(EvalBatches(held_out, BatchPlan(global_batch_size=1, micro_batch_size=1)))) == len(held_out)


def test_ranks_reject_another_tokenizer_and_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    assert hash_of_tokenizer(TOKENIZER) == _HASH_OF_BYTES
    same = written(tmp_path / "a", vocabulary=Vocabulary("bytes", _HASH_OF_BYTES))
    selected(config(same))
    other = config(written(tmp_path / "b", vocabulary=Vocabulary("some/model", "0")))
    message = r"data.path=.*b: was written with the tokenizer some/model.*set model.tokenizer=some/model"
    with pytest.raises(ConfigError, match=message):
        selected(other)
    write_datatrove(tmp_path / "c.ds", [[1, 2, 300] * 200], 2)
    (tmp_path / "c").mkdir()
    write_manifest(manifest_of([scanned(tmp_path / "c.ds")], tmp_path / "c"))
    with pytest.raises(ConfigError, match="holds the id 300 .*but the vocabulary has 260 tokens"):
        selected(config(tmp_path / "c"), "eval")


def test_store_without_enough_rows_is_rejected(tmp_path: Path) -> None:
    write_manifest(store_of(tmp_path / "a", [[[1, 2, 3]]]))
    with pytest.raises(ConfigError, match="its 3 tokens are too few for a train and a held-out row"):
        selected(config(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"data.path=.*: there is no manifest.json; .*docs/data.md shows how"):
        selected(config(tmp_path / "none"))
    file = tmp_path / "a" / "manifest.json"
    file.write_text(file.read_text().replace('"tokens": 3', '"tokens": 4'))
    with pytest.raises(ConfigError, match="is damaged or was edited: it does not match its checksum"):
        selected(config(tmp_path / "a"))


def test_shards_of_a_folder_are_indexed_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest names shards relative to its own folder, so that the store can be moved."""
    (tmp_path / "store").mkdir()
    for number, shard in enumerate(SHARDS):
        np.asarray(flat(shard), np.uint16).tofile(tmp_path / "store" / f"{number}.bin")
    monkeypatch.chdir(tmp_path)
    index_folder(Path("store"), TOKENIZER, document_end=EOS)
    (tmp_path / "store").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    manifest = read_manifest(str(tmp_path / "moved"))
    assert manifest.documents == sum(map(len, SHARDS))
    assert manifest.vocabulary == Vocabulary(TOKENIZER.name_or_path, _HASH_OF_BYTES)
    rows = rows_of(manifest)
    assert rows[0].input_ids == flat(SHARDS[0])[:SEQ]
    with pytest.raises(ValueError, match="has no shards"):
        index_folder(tmp_path, TOKENIZER)
    assert "not in the manifest, as they are no shards or not directly in the folder: moved/0.bin, " in caplog.text


def test_end_token_is_that_of_the_byte_tokenizer() -> None:
    assert TOKENIZER.eos_token_id == EOS
    assert isinstance(PackedRow([], [], []).next_label, int)
