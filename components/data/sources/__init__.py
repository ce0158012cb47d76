"""Where samples come from.

split.py     one split (train or held-out) of a source, streamed rather than loaded
rows.py      rows of a source, and how they become conversations or documents
files.py     JSON, CSV and Parquet files; hub_rows.py: data sets of the hub
pydocs.py    questions about Python's documentation; text.py: plain text
"""
