"""Object stores (s3://, gs://, az://, hf://) through fsspec. Imports neither torch nor numpy.

urls.py          which strings are URLs of object stores, and what is wrong with one
object_store.py  ObjectStore: verified reads and writes, repeated a bounded number of times if they fail
node_cache.py    NodeCache: objects and parts of objects on this node's disk, below a limit in bytes
"""
