"""The lines of docs/data.md that tokenize a corpus with an array of jobs, submitted to a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.slurm.cluster import WAIT_TIMEOUT
from tests.slurm.login import PROJECT, Login
from tests.suites import in_torture
from tests.unit.test_tokenize_corpus import files_of

FILES = 7
"""More than the tasks of the array, and not a multiple of them."""
SMALLER = {
    "Qwen/Qwen3-0.6B": "bytes",
    "--cpus-per-task=8": "--cpus-per-task=1",
    "--array=1-16": "--array=1-3",
    "TASK_ID/16": "TASK_ID/3",
    "python scripts": f"{sys.executable} {PROJECT}/scripts",
}


def documented_lines() -> str:
    """Return the block of the page, for the tokenizer of bytes and three tasks."""
    (block,) = re.findall(r"```bash\n(job=\$\(sbatch .*?)```", (PROJECT / "docs" / "data.md").read_text(), re.DOTALL)
    for documented, smaller in SMALLER.items():
        assert documented in block
        block = block.replace(documented, smaller)
    return block


@in_torture
def test_documented_array_writes_the_store_of_one_process(login: Login) -> None:
    corpus = login.folder / "corpus"
    corpus.mkdir()
    for number in range(FILES):
        (corpus / f"{number}.jsonl").write_text(f'{{"text": "document {number}"}}\n' * (10 + number))
    script = [sys.executable, str(PROJECT / "scripts" / "tokenize_corpus.py")]
    alone = [*script, "corpus", "--tokenizer", "bytes", "--out", "alone"]
    subprocess.run(alone, cwd=login.folder, check=True, capture_output=True, timeout=WAIT_TIMEOUT)

    submitted = subprocess.run(
        ["bash", "-euc", documented_lines()],
        cwd=login.folder,
        env=dict(login.cluster.environment),
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
    )
    login.cluster.wait_for(submitted.stdout.split()[-1], "COMPLETED")
    assert files_of(login.folder / "store") == files_of(login.folder / "alone")
    assert len(list((login.folder / "store").glob("*.safetensors"))) == FILES
