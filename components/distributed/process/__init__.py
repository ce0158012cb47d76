"""Processes of a run: ranks, rendezvous, start-up and shutdown of the process group, and synchronization.

process_group.py  start_process_group, the start-up of every recipe; exchange_text_from_rank_zero, before it; shutdown
environment.py    rank, world size and node from environment variables; network interfaces; CPUs near the GPU
rendezvous.py     address and TCPStore of the ranks, and authenticated access to it from other nodes
groups.py         get_rank, get_num_nodes, ...; members of a process group, backends, random seeds
barriers.py       barriers with their own timeouts; sections that ranks run one after another
store_sync.py     synchronization through the store, which barriers and ordered sections use
"""
