"""Components of the recipes.

config         typed sections, composition, validation
protocol       conventions between launcher and ranks: variables, files, exit statuses
launch         command line, run directory, local and Slurm launchers
distributed    processes, device mesh, parallelism
models         Hugging Face causal LMs on a mesh
data           sources, packing, micro-batches
observability  metrics, banner, result
resilience     watchdog, stop requests, fault injection
checkpoint     save, resume, retention
training       the optimizer step, and everything around a recipe's loop
parity         comparison of a mesh with a single process

batch               micro-batch of a rank
chat_template       rendering of conversations by templates that come with a model
console             rich console for untrusted text
conversation        messages in the format of chat templates
dtypes              torch dtypes by name, and the one that autocast uses
exchange            collectives on JSON values
kernel_counters     memory limit of this process, out-of-memory kills, bytes moved
lazy                packages that import a name when it is first used
safetensors_writer  streaming writer of safetensors files
terminal            escaping of control characters
varlen              inputs of torch's variable-length attention kernel

`from components import data, distributed, training` imports no torch: these packages import a name when it is first
used (lazy.py).
"""
