"""Trackers: services that show the metrics of runs, beside metrics.jsonl. Several can be used at once, on rank 0 only.

python recipes/finetune.py logging.tensorboard=true              # then: tensorboard --logdir outputs
python recipes/finetune.py logging.mlflow.enabled=true           # then, with the package mlflow:
    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri mlruns
python recipes/finetune.py logging.trackio.enabled=true          # then: trackio show
python recipes/finetune.py logging.wandb.mode=offline            # then: wandb sync

tracker.py      Tracker, the interface of all of them, and TrackedRun
enabled.py      Trackers: those that a config enables; a failure of one never stops a run
wandb.py, tensorboard.py, mlflow.py, trackio.py: one tracker each

To add one, write a class with the methods of Tracker, a section of LoggingConfig, a line in `enabled_trackers` and one
in `tracker_problems` (config/rules/run_rules.py) for its package.
"""
