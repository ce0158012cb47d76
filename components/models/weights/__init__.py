"""Model weights: loading, random initialization, gathering from ranks, and export.

loading.py           fill_weights: load_weights from files, or initialize.py from a seed
memory.py            materialize: memory for the parameters of a meta model, values for its buffers
safetensors_files.py reading safetensors by block; gguf.py: reading GGUF; hub_files.py: errors of the Hugging Face hub
weight_files.py      writing safetensors by block
shards.py            blocks of a full tensor that a rank holds; gather.py: full tensors, gathered on rank 0
names.py             which tensors are saved, and which are tied
export.py            export_run, export_model, export_stored: folders for transformers; adapter_files.py: for PEFT
untrained.py         what an export copies from the pretrained model: encoders of images and sound, MTP layers
new_folder.py        NewFolder: a folder that is renamed into place once it is complete
"""
