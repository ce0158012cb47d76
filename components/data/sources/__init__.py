"""Data sources: readers of rows and their conversion to conversations or documents.

split.py     SourceSplit: one split (train or held-out) of a source, streamed rather than loaded
rows.py      conversion of rows to conversations or documents
files.py     JSON, CSV, Parquet and Arrow files; hub_rows.py: hub datasets
split_files.py: the files of a split, in a folder or an object store (objects.py)
pydocs.py    questions about Python's documentation; text.py: plain text
"""
