"""Shards that megatron-core's own writer wrote: ids and documents equal those of its reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from components.data.token_store.shards import Shard
from components.data.token_store.writer import layout_of, scan_shard

MEGATRON = Path(sys.prefix) / "megatron"
"""Folder of the package, apart from site-packages: accelerate imports it wherever it finds it."""
WRITE_AND_READ = """
import sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

for name, dtype, largest in (("uint16", np.uint16, 50_000), ("int32", np.int32, 200_000)):
    random, prefix = np.random.default_rng(0), f"{sys.argv[1]}/{name}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in random.integers(1, 4, 200):
        for length in random.integers(1, 80, sequences):
            builder.add_item(torch.from_numpy(random.integers(0, largest, length)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    read = IndexedDataset(prefix)
    np.savez(f"{prefix}.npz", ids=np.concatenate([read[index] for index in range(len(read))]),
             ends=np.cumsum(read.sequence_lengths)[read.document_indices[1:] - 1])
"""


@pytest.mark.skipif(not MEGATRON.exists(), reason="needs megatron-core, which .ci/run installs")
def test_ids_and_documents_equal_those_of_megatron(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(MEGATRON), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", WRITE_AND_READ, str(tmp_path)], env=environment, check=True, timeout=120)
    for name in ("uint16", "int32"):
        path, read = tmp_path / f"{name}.bin", np.load(tmp_path / f"{name}.npz")
        entry = scan_shard(path, **layout_of(path)._asdict(), document_end=None)
        shard = Shard(entry, path, None)
        ids = shard.ids(0, entry.tokens)
        assert np.array_equal(ids, read["ids"])
        assert shard.ends(0, ids) == read["ends"].tolist()
        assert (entry.documents, entry.max_id) == (200, read["ids"].max())
