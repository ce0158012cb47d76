"""Token stores: tokens of a corpus on disk, in many shards that a manifest lists.

manifest.py  Manifest, ShardEntry: counts, hashes and largest ids of the shards; hash of a tokenizer's vocabulary
shards.py    Shard, ShardFiles: token ids, document ends and loss mask of one shard, opened lazily
writer.py    write_shard: Meshbook's format; index_folder: the manifest of shards, also of other programs
corpus.py    tokenize_file: a file or an object of a corpus to a shard, for scripts/tokenize_corpus.py
rows.py      TokenRows, RowSelection: rows of seq_len tokens by shard and offset; shards in an object store
"""
