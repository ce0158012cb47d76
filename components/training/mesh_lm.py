"""lm-eval's interface to a model, over a model that is sharded on a mesh. Imports lm-eval, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from components import models
from components.chat_template import ChatTemplate
from components.conversation import Conversation, Prompt
from components.protocol.errors import ConfigError
from components.training.context import RunContext
from components.training.evaluation import Continuation, RequestBatches, generation_forward, score_continuations
from components.training.prepared import Prepared

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

_SAMPLING_KEYS = ("do_sample", "temperature", "top_p", "top_k")
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
GENERATION_KEYS = frozenset(["until", *_SAMPLING_KEYS, *_LENGTH_KEYS])
"""Keys of a task's generation_kwargs that `generate_until` supports."""


_ROWS = 32
"""Answers that a rank generates at once unless evaluation.batch_size is set."""


class Stopped(Exception):
    """A stop request ended the evaluation; raised on all ranks."""


class MeshLM(TemplateLM):
    """A model on any mesh, computed like held-out losses: without an export, and without logits of a whole batch.

    Every rank passes all requests and gets all results. lm-eval sees one process; `score_continuations` divides the
    requests over the data-parallel ranks. Results equal those of lm-eval's own Hugging Face backend in one process.
    """

    def __init__(
        self,
        model: Prepared,
        tokenizer: PreTrainedTokenizerBase,
        batches: RequestBatches,
        max_length: int,
        run: RunContext,
    ) -> None:
        """Wrap a model in evaluation mode.

        Args:
            max_length: Context length of the model in tokens.
        """
        super().__init__()
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._model, self._batches, self._run = model, batches, run
        self._max_length = max_length

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Context of texts without one."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer; part of lm-eval's interface for chat templates."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, with the tokenizer's special tokens unless the text begins with them."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the tokenizer's chat template formats it."""
        continues = {} if add_generation_prompt else {"continue_final_message": True}
        conversation = Conversation("evaluation.apply_chat_template=true", chat_history, template_kwargs=continues)
        try:
            return self._template.render(conversation, add_generation_prompt=add_generation_prompt).text
        except ConfigError as error:
            raise ConfigError(f"{error}; or set evaluation.apply_chat_template=false") from error

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would produce it."""
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text; one longer than the context is cut into windows."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._max_length, 1)
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append((("", text), context, continuation))
                owners.append(index)
        sums = [0.0] * len(requests)
        for index, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[index] += log_prob
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the scores of requests (texts, tokens of the context, tokens of the continuation)."""
        limit, cut, continuations = self._max_length + 1, 0, []
        for (_, text), context, continuation in requests:
            if not 0 < len(continuation) < limit:
                raise ConfigError(
                    f"evaluation.tasks: the continuation {text!r:.60} has {len(continuation)} tokens; it must have at "
                    f"least 1, and at most the {self._max_length} of the model's context; change the task"
                )
            tokens = context + continuation
            cut += len(tokens) > limit
            continuations.append(Continuation(tuple(tokens[-limit:]), len(continuation)))
        if cut:
            self._run.print(f"tasks: {cut} requests are longer than the model's context and lose their beginning")
        if not continuations:
            return []
        scores = score_continuations(self._model, continuations, self._batches, self._run.agreed_to_stop)
        if scores is None:
            raise Stopped
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated continuation of each context, up to a stop sequence.

        Requests with the same options are generated together; the number of a sample is its place among them.
        """
        together: dict[tuple[int, models.Sampling], list[int]] = {}
        prompts, texts, until = list[Prompt](), [""] * len(requests), list[list[str]]()
        for index, request in enumerate(requests):
            context, options = request.args
            settings = normalize_gen_kwargs(options)
            longest = settings["max_gen_toks"]
            if longest >= self._max_length:
                raise ConfigError(
                    f"evaluation.tasks: a task generates max_gen_toks={longest} tokens, which must be less than the "
                    f"{self._max_length} of the model's context; change the task"
                )
            prompts.append(Prompt(context, self.tok_encode(context)[-(self._max_length - longest) :]))
            until.append(handle_stop_sequences(list(settings["until"]), self.tokenizer.decode(self.eot_token_id)))
            sampling = models.Sampling(
                temperature=settings.get("temperature", 0.0) if settings["do_sample"] else 0.0,
                top_p=settings.get("top_p", 1.0),
                top_k=settings.get("top_k", 0),
            )
            together.setdefault((longest, sampling), []).append(index)

        rows = self._batches.rows or _ROWS
        with generation_forward(self._model, self._run, rows, self._max_length) as forward:
            for (longest, sampling), indices in together.items():
                chosen = [prompts[index] for index in indices]

                def ends(place: int, answer: list[int], indices: list[int] = indices) -> bool:
                    text = self._decoded(answer)
                    return any(stop and stop in text for stop in until[indices[place]])

                answers = models.generate_tokens(
                    self._model.module, self.tokenizer, chosen, longest, forward, sampling, ends
                )
                if not answers:
                    raise Stopped
                for index, answer in zip(indices, answers, strict=True):
                    texts[index] = str(postprocess_generated_text(self._decoded(answer), until[index], None))
        return texts

    def _decoded(self, answer: list[int]) -> str:
        return str(self.tokenizer.decode(answer, skip_special_tokens=True))
