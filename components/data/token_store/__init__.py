"""Token stores: tokens of a corpus on disk, in many shards that a manifest lists.

manifest.py     Manifest, ShardEntry: counts, hashes and largest ids of the shards; a start reads nothing else
formats.py      formats of shards: Meshbook's, Megatron, nanoGPT and OLMo, datatrove
shards.py       Shard, ShardFiles: token ids and document ends of one shard, opened lazily
remote_shards.py RemoteShards: shards in an object store, read in parts through the cache of the node; Prefetch
writer.py       write_shard: writing of shards; index_folder: the manifest of existing ones
corpus.py       tokenize_file: a file of a corpus to a shard, for scripts/tokenize_corpus.py
rows.py         TokenRows: rows of seq_len tokens by shard and offset; RowSelection: train and held-out rows
vocabulary.py   hash of a tokenizer's vocabulary, from its files or from the tokenizer
"""
