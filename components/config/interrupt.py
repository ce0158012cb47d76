"""What a run prints at once when it receives Ctrl-C, in the launcher as on a single rank. Imports no torch."""

ANSWER = "Ctrl-C: stopping after this step; again to abort"
