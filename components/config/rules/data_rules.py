"""Rules about the data as a whole."""

from __future__ import annotations

from components.config.schema.data import DataConfig, MixtureDataConfig, RowsDataConfig


def data_problems(data: DataConfig) -> list[str]:
    """Require held-out samples, and weights of sources of a mixture only."""
    problems = []
    if data.weight is not None:
        problems.append(f"data.weight={data.weight}: only sources of a mixture have weights; leave it out")
    sources = data.sources if isinstance(data, MixtureDataConfig) else {"": data}
    if any(
        each.eval_fraction or each.eval_split is not None or (isinstance(each, RowsDataConfig) and each.eval_path)
        for each in sources.values()
    ):
        return problems
    rule = "nothing is held out, but there is always an evaluation at the end"
    if isinstance(data, MixtureDataConfig):
        problems.append(
            f"data.sources: {', '.join(sources)} have eval_fraction=0: {rule}; set data.sources.NAME.eval_fraction of "
            "one above 0, or its eval_split"
        )
    else:
        other = "data.eval_split or data.eval_path" if isinstance(data, RowsDataConfig) else "data.eval_split"
        problems.append(f"data.eval_fraction={data.eval_fraction}: {rule}; set it above 0, or set {other}")
    return problems
