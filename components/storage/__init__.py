"""Object stores (s3://, gs://, az://, hf://) through fsspec. Imports neither torch nor numpy.

object_store.py  ObjectStore: verified reads and writes, repeated a bounded number of times if they fail; URLs
node_cache.py    NodeCache: objects and parts of objects on this node's disk, below a limit in bytes
run_claim.py     run.json: the run that a URL belongs to
tensor_files.py  the writer and the reader of files of tensors, verified as they are read; numbers known about files
"""
