"""Components of the recipes.

protocol/       conventions between launcher and ranks: variables, files, signals, errors, exit statuses
config/         typed sections, composition, validation
storage/        object stores
launch/         command line, run directory, sweeps; backends for this machine, Slurm and Kubernetes
distributed/    processes, device mesh, parallelism
models/         Hugging Face causal LMs on a mesh
data/           sources, tokenization, packing, micro-batches
observability/  console, metrics, trackers, result
watch/          watchdog, stop requests, fault injection
checkpoint/     save, resume, retention
training/       the optimizer step, and everything around a recipe's loop
planning/       memory and time of a run, before it is started; comparison of a mesh with a single process

batch.py               micro-batch of a rank
chat_template.py       rendering of conversations by templates that come with a model
conversation.py        messages in the format of chat templates
json_collectives.py    collectives on JSON values
package.py             folders of Meshbook; packages that import a name when it is first used
presentation.py        tables for the console, by rich; curves as PNG files, by matplotlib
terminal.py            control characters escaped, secrets masked, text fitted to the terminal
torch_kernels.py       dtypes by name, the dtype of autocast, inputs of torch's variable-length attention kernel

`from components import data, distributed, training` imports no torch: these packages import a name when it is first
used (package.py).
"""
