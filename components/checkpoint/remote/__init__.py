"""Copies of a run's checkpoints in an object store (checkpoint.remote).

remote_listing.py  RemoteCheckpoint, list_remote: the checkpoints below a URL
mirror.py          Mirror: copy each published checkpoint, manifest last, and apply the retention policy
fetch.py           fetch_checkpoint: copy one back to the run directory
"""
