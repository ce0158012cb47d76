"""Re-export of `get_sync_ctx`, which selects the micro-batches whose backward reduces gradients."""

from components.distributed.fsdp import UnknownShardingError, get_sync_ctx

__all__ = ["UnknownShardingError", "get_sync_ctx"]
