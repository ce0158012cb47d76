"""Processes of a run: ranks, rendezvous, start-up and shutdown of the process group, and synchronization.

process_group.py    start_process_group, the start-up of every recipe; exchange_text_from_rank_zero, before it
environment.py      rank, world size and node of this process, read from torchrun's or Slurm's variables and validated
rendezvous.py       address and TCPStore of the ranks; relay.py: authenticated access to it from other nodes
network.py          NCCL and gloo interfaces; backends.py: which devices a backend supports
seeding.py          random seeds; shutdown.py: destroying the process group
ranks.py            get_rank, get_num_nodes, ...; groups.py: the members of a process group and their nodes
barriers.py         barriers with their own timeouts; ordering.py: sections that ranks run one after another
store_sync.py       synchronization through the store, which both use
tensor_metadata.py  dtype and shape of a value, exchanged before the value
"""
