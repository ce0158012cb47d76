"""Processes of a run: who this rank is, where ranks meet, and what they wait for.

process_group.py   start_process_group: the one start-up; exchange_text_from_rank_zero, before it
environment.py     this rank's place from one source, checked; rendezvous.py and relay.py: where the ranks meet
network.py, backends.py, seeding.py, shutdown.py   what start-up and end do besides
ranks.py           get_rank, get_num_nodes, ...; groups.py: the members of a group and their nodes
barriers.py        barriers with timeouts that hold; ordering.py: sections that ranks run one after the other
store_sync.py      what both wait through; tensor_metadata.py: dtype and shape of a tensor that a peer will send
"""
