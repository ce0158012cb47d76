"""Tools for work on this repository: size budgets and code metrics."""
