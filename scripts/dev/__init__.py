"""Tools for work on this repository: size budgets, code metrics, and the pairs of a result in RESULTS.md."""
