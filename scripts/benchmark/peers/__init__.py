"""Arms of compare.py, one file each: programs that train a workload and write their measurements.

workload.py   sizes, settings, and the tokens of every step
make.py       writes a workload's model, adapter and tokens
meter.py      time, memory and losses of an arm, measured in the same way for all
hf.py         the common model, loaded by transformers and peft
loop.py       bare PyTorch loop over transformers' model: the reference of every loss curve
meshbook.py   recipes/finetune.py
trainer.py    transformers.Trainer
torchtune.py  torchtune's model, loss and step, combined as in its recipes
torchtitan.py torchtitan's model, loss and step, combined as in its Trainer
automodel.py  NeMo AutoModel's model, loss and step, combined as in its recipe
litgpt.py     litgpt's model, loss and step, combined as in `litgpt pretrain`
roof.py       not an arm: throughput of a large matmul

An arm needs torch, numpy and its framework; with `--python` it runs in another environment.
"""
