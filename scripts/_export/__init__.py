"""What scripts/export.py and scripts/average.py share.

options.py       options of the written folder (--out, --dtype, --shard-size), and run_export: exit status and output
object_output.py --out URL: upload to an object store
hub.py           upload to the Hugging Face hub (--push)
checkpoints.py   a checkpoint as a model on the meta device and a reader of its weights
sources.py       the checkpoints and exports that scripts/average.py averages
"""
