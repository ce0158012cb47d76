"""Store a teacher's most likely tokens, so that recipes/distill.py can train students without running the teacher.

python scripts/teacher.py teacher.path=T data=jsonl data.path=mine.jsonl run.dir=outputs/teacher/mine
python recipes/distill.py teacher.stored=outputs/teacher/mine data=jsonl data.path=mine.jsonl   # then
python scripts/teacher.py teacher.path=T teacher.top_k=256                              # more tokens (default: 64)
python scripts/teacher.py teacher.path=T objective.temperature=2                        # for a distillation at this one
python scripts/teacher.py teacher.path=T parallelism=fsdp2_tp2 cluster=local_4proc      # a teacher on several devices

Takes the options of recipes/distill.py. The data, the tokenizer, training.seq_len, data.pack and objective.temperature
must be the same in both, and the student (model) must have the same vocabulary; the mesh may differ.

Runs the teacher once over the train and the held-out split. For each target token it stores, in 8 k + 8 bytes, the ids
and float32 log-probabilities of the k most likely tokens, the log-probability of all others together, and that of the
target. The file of a split appears in run.dir once it is complete. The same command again stores what is missing; a
file of other data or settings is never replaced.
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import StoreTeacherConfig
from components.launch import recipe


@recipe("teacher")
def main(cfg: StoreTeacherConfig) -> None:
    """Store the teacher's most likely tokens on this rank. The launcher calls it in every process."""
    with training.EvaluationRun(training.teacher_run_config(cfg)) as run:
        tokenizer = models.load_tokenizer(cfg.model)
        store = training.build_teacher_store(cfg, run, tokenizer)
        run.begin(store.teacher, notes=store.teacher.notes)
        seq_len = cfg.training.seq_len
        texts = {
            split: data.build_dataset(cfg.data, tokenizer, seq_len=seq_len, split=split) for split in ("train", "eval")
        }
        for split, each in texts.items():
            store.store(each, split)
        if not run.stopped:
            run.print(f"next: recipes/distill.py with teacher.stored={run.dir}, and the same data and model")


if __name__ == "__main__":
    main()
