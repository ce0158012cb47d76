"""Weights: read, filled, moved between ranks, and written.

loading.py       fill_weights: load_weights from disk, or initialize.py from a seed; memory.py: materialize
weight_files.py  safetensors files, streamed; safetensors_files.py, gguf.py, hub_files.py: files of others
shards.py        the part of a tensor that a rank holds; gather.py: the parts of all ranks together
names.py         which tensors are saved; nf4.py: 4 bits a value
export.py        export_run, export_model, export_stored: a folder that transformers loads; adapter_files.py: PEFT's
new_folder.py    lets a folder appear once it is complete
"""
