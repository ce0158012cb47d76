"""Command line of the test cluster; cluster.py shows its use."""

from __future__ import annotations

import argparse
import os
import sys

from tests.slurm.cluster import Cluster, ClusterError, ClusterInUse
from tests.slurm.requirements import missing_requirement


def main() -> None:
    """Run one action on a cluster. `up` and `status` print the export line that points a shell to it."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description="A real Slurm of eight nodes.")
    parser.add_argument("action", choices=["up", "down", "status", "crash", "boot", "cut", "heal"])
    parser.add_argument("node", nargs="?", help="a node, such as 3 or n3")
    parser.add_argument("--id", type=int, default=int(os.environ.get("MESHBOOK_SLURM_ID", "0")), help="which cluster")
    arguments = parser.parse_args()
    if (arguments.node is None) == (arguments.action in ("crash", "boot", "cut", "heal")):
        parser.error(f"{arguments.action} takes {'no' if arguments.node else 'a'} node")
    reason = missing_requirement()
    if reason:
        sys.exit(reason)
    try:
        _act(Cluster(arguments.id), arguments.action, arguments.node)
    except ClusterError as error:
        sys.exit(str(error))


def _act(cluster: Cluster, action: str, node: str | None) -> None:
    if action == "up":
        try:
            cluster.start(lasting=True)
        except ClusterInUse as error:
            print(error, file=sys.stderr)
    elif action == "down":
        cluster.stop()
    elif node:
        getattr(cluster, action)(f"n{node.removeprefix('n')}")
    if action in ("up", "status"):
        print(", ".join(f"{name} {state}" for name, state in cluster.node_states().items()), file=sys.stderr)
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
