"""The arms of compare.py, a file each: it trains a workload in a process of its own, and tells what that took.

workload.py   what is trained: sizes, settings, and the tokens of every step
make.py       writes it once: model, adapter and tokens
meter.py      the clock, memory and losses of an arm, the same for all
hf.py         the common model as transformers and peft load it
loop.py       bare PyTorch over transformers' model: the reference of every loss curve
meshbook.py   recipes/finetune.py itself
trainer.py    transformers.Trainer
torchtune.py  torchtune's model, loss and step, as its recipes put them together
litgpt.py     litgpt's model, loss and step, as `litgpt pretrain` puts them together
roof.py       no arm: a large matrix product

An arm needs torch, numpy and its own package: with `--python` it runs in another environment.
"""
