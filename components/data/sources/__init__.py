"""Data sources: readers of rows and their conversion to conversations or documents.

split.py        SourceSplit: one split (train or held-out) of a source, streamed; rows of hub datasets
split_files.py  the files of a split, in a folder or copied from an object store
files.py        JSON, CSV, Parquet and Arrow files
rows.py         conversion of rows to conversations or documents
columns.py      rows of pairs and labeled answers; the settings that fit a source's columns, for messages
text.py         plain text as documents; questions about Python's documentation, and the standard library
"""
