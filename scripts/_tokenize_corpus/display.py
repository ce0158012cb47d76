"""Progress of the tokenization of a corpus: a bar on a terminal, a line per finished file elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from components.data.token_store.corpus import InputFile, Outcome, Progress
from components.terminal import print_text


class Display:
    """Counts of a tokenization, and the bar that shows them.

    The bar counts bytes of the input files. Those of an unfinished file are estimated by its characters so far; of a
    compressed one nothing is counted before its end.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        # Without its own thread, so that this process may fork at any time.
        self._bar = Bar(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
        self._sizes = {file: max(file.bytes, 1) for file in files}
        self._done = dict.fromkeys(files, 0)
        self._finished, self._began = 0, time.monotonic()
        self._task = self._bar.add_task("", total=sum(self._sizes.values()))
        self.tokens = 0
        """Tokens of all files so far, without those of kept shards."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar within the context."""
        with nullcontext() if self._bar.disable else self._bar:  # a disabled bar of rich 13 prints an empty line
            yield

    def advance(self, file: InputFile, progress: Progress) -> None:
        """Count work on an unfinished file."""
        self.tokens += progress.tokens
        if not file.is_compressed:
            self._done[file] = min(self._done[file] + progress.characters, self._sizes[file])

    def finish(self, file: InputFile, outcome: Outcome | None) -> None:
        """Count a finished file; None: it failed."""
        self._done[file] = self._sizes[file]
        self._finished += 1
        if outcome is not None and self._bar.disable:
            what = "kept" if outcome.is_kept else f"{outcome.entry.tokens:,} tokens"
            left_out = f", {outcome.bad_rows:,} bad rows left out" if outcome.bad_rows else ""
            print_text(f"{file.shard}: {outcome.entry.documents:,} documents, {what}{left_out}", flush=True)

    def refresh(self) -> None:
        """Draw the bar anew."""
        rate = self.tokens / max(time.monotonic() - self._began, 1e-9)
        text = f"{self._finished:,} of {len(self._sizes):,} files, {self.tokens:,} tokens, {rate:,.0f}/s"
        self._bar.update(self._task, completed=sum(self._done.values()), description=text, refresh=True)
