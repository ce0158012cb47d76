"""Data sources: readers of rows and their conversion to conversations or documents.

split.py     SourceSplit: one split (train or held-out) of a source, streamed rather than loaded
rows.py      conversion of rows to conversations or documents
files.py     JSON, CSV and Parquet files; hub_rows.py: hub datasets
pydocs.py    questions about Python's documentation; text.py: plain text
"""
