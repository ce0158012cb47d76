"""Answer a file of prompts with a model on any mesh, and write the answers to a file as they are generated.

python scripts/answer.py answers.prompts=questions.jsonl run=outputs/finetune/RUN run.dir=outputs/answers/mine
python scripts/answer.py answers.prompts=questions.jsonl model=qwen3_0_6b parallelism=fsdp2_tp2 cluster=local_4proc
python scripts/answer.py answers.prompts=questions.jsonl answers.per_prompt=8 generation.temperature=0.8

Takes the options of recipes/evaluate.py. Each line of the prompts is {"prompt": "a message"}, or {"messages": [...]}, a
conversation up to the answer, both with "system", "tools" and "chat_template_kwargs" if there are any. answers.jsonl in
the run directory has a line per answer, in the order of the prompts: the number of the prompt and of its answer, the
text, its tokens, and whether it is complete or cut at generation.max_new_tokens. The same command with the same run.dir
continues after the last answer that is there; answers to other prompts, of other weights or with other settings are
never mixed.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from components import checkpoint, models, training
from components.config.schema import AnswerPromptsConfig
from components.conversation import Prompt, read_prompts
from components.json_collectives import broadcast_json
from components.launch import recipe
from components.protocol.errors import ConfigError
from components.protocol.run_files import open_append
from components.protocol.safe_parsing import parse_json


@recipe("answer")
def main(cfg: AnswerPromptsConfig) -> None:
    """Answer on this rank. The launcher calls it in every process."""
    with training.EvaluationRun(cfg) as run:
        tokenizer = models.load_tokenizer(cfg.model, run.resume_from)
        read, unused = read_prompts(cfg.answers.prompts)
        prompts = training.encoded_prompts(tokenizer, read, cfg.data)
        settings, file = _settings(cfg, prompts, run.resume_from), Path(run.dir, "answers.jsonl")
        total = len(prompts) * cfg.answers.per_prompt
        answered = broadcast_json(
            _answered_before(file, settings, cuts=run.rank == 0)
        )  # an error is raised on all ranks

        model = training.prepare(cfg, run, len(tokenizer))
        if run.resume_from is not None:
            checkpoint.load_model_weights(run.resume_from, model.module, averaged=cfg.evaluation.average)
        notes = [f"answers: {answered:,} of {total:,} are in {file}"]
        notes += [f"prompts: keys that are not used: {', '.join(unused)}"] if unused else []
        run.begin(model, notes=[*model.notes, *notes])

        how = cfg.generation
        longest = max((len(prompt.tokens) for prompt in prompts), default=0) + how.max_new_tokens
        with (
            training.generation_forward(model, run, how.rows, longest) as forward,
            run.status("answering", total) as advance,
        ):
            at_once = how.rows * forward.share[1]
            for start in range(answered, total, at_once):
                samples = range(start, min(start + at_once, total))
                asked = [prompts[sample // cfg.answers.per_prompt] for sample in samples]
                sampling = models.Sampling(how.temperature, how.top_p, how.seed, first_sample=start)
                answers = models.generate_tokens(model.module, tokenizer, asked, how.max_new_tokens, forward, sampling)
                if not answers:
                    break
                if run.rank == 0:
                    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
                    _append(file, [_line(*each, cfg, settings) for each in zip(samples, texts, answers, strict=True)])
                for _ in samples:
                    advance()
        if not run.stopped:
            run.print(f"{file}: {total:,} answers to {len(prompts):,} prompts")


def _settings(cfg: AnswerPromptsConfig, prompts: list[Prompt], weights: Path | None) -> str:
    """Return a hash of all that the answers depend on, but for the mesh and the precision."""
    how = cfg.generation
    parts = [
        *(str(cfg.model.origin), cfg.run.seed, str(weights), cfg.evaluation.average, cfg.answers.per_prompt),
        *(how.max_new_tokens, how.temperature, how.top_p, how.seed),
        [prompt.tokens for prompt in prompts],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _line(sample: int, text: str, tokens: list[int], cfg: AnswerPromptsConfig, settings: str) -> dict[str, object]:
    """Return the line of an answer."""
    prompt, number = divmod(sample, cfg.answers.per_prompt)
    is_complete = len(tokens) < cfg.generation.max_new_tokens
    values = {"prompt": prompt, "sample": number, "answer": text.strip(), "tokens": len(tokens)}
    return {**values, "is_complete": is_complete, "settings": settings}


def _answered_before(file: Path, settings: str, *, cuts: bool) -> int:
    """Return the number of complete lines of a file; `cuts`: cut what a killed run has left after them.

    Raises ConfigError if the answers are not those of these prompts, weights and settings.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return 0
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            fits = parse_json(line)["settings"] == settings
        except (ValueError, TypeError, KeyError):
            fits = False
        if not fits:
            raise ConfigError(
                f"run.dir={file.parent}: line {number} of {file.name} is no answer to these prompts with these weights "
                "and settings; choose another run.dir, or remove the file"
            )
    if cuts and len(whole) < len(content):
        os.truncate(file, len(whole))
    return whole.count(b"\n")


def _append(file: Path, lines: list[dict[str, object]]) -> None:
    """Add lines to a file, and wait until they are on the disk."""
    with open_append(file) as output:
        output.write("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode())
        os.fsync(output.fileno())


if __name__ == "__main__":
    main()
