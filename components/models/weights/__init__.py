"""Model weights: loading, random initialization, gathering from ranks, and export.

loading.py         fill_weights: weights from files or from a seed; materialize: memory for a meta model's parameters
weight_sources.py  reading safetensors and GGUF files by block; names of tensors, and which are tied
quantized_files.py reading quantized safetensors, decoded block by block
weight_files.py    writing safetensors by block; NewFolder, renamed into place once it is complete; exported adapters
shards.py          blocks of a full tensor that a rank holds; full tensors, gathered on rank 0
export.py          export_run, export_model, export_stored: folders for transformers
untrained.py       what an export copies from the pretrained model: encoders of images and sound, MTP layers
"""
