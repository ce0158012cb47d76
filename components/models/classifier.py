"""Sequence classification and reward models: a decoder with a score head, as in AutoModelForSequenceClassification.

transformers' models score one token per row, the last one that is not the pad token. The forward here returns the
scores of all tokens, like the logits of a causal LM whose vocabulary are the labels. The loss then selects the scored
token by its target, so that context parallelism, pipeline stages and packed rows need no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.models.anatomy import ChangedForward
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SCORE = "score"
"""Name of the score head in transformers' models."""
LM_HEAD_TENSORS = r"^(lm_head|embed_out)\.(weight|bias)$"
"""Tensors of a causal LM's files that a score model does not have."""


class TokenScores(ChangedForward, nn.Module):
    """Mixin for a transformers model for sequence classification: scores of all tokens instead of one per row."""

    base_model_prefix: str
    score: nn.Linear

    def get_output_embeddings(self) -> nn.Linear:
        """Return the score head, which is handled like the LM head of a causal LM."""
        return self.score

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return an output with `logits` (batch, seq, labels).

        Args:
            input_ids, position_ids: (batch, seq).
            inputs_embeds: (batch, seq, hidden), instead of input_ids.
            kwargs: Further arguments of the decoder layers.
        """
        from transformers.modeling_outputs import CausalLMOutputWithPast

        inner = self._modules[self.base_model_prefix]
        outputs = inner(  # type: ignore[misc]
            input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs
        )
        # The trained head stays in float32 over frozen weights in bfloat16.
        return CausalLMOutputWithPast(logits=self.score(outputs[0].to(self.score.weight.dtype)))


def set_labels(config: PreTrainedConfig, labels: Sequence[str]) -> None:
    """Write the names of a score head's outputs to a config.

    Raises ConfigError if the config is that of a score head with the same names in another order.
    """
    has_head = any(architecture.endswith("ForSequenceClassification") for architecture in config.architectures or [])
    names = {int(number): name for number, name in (config.id2label or {}).items()} if has_head else {}
    own = [names[number] for number in sorted(names)]
    if own != list(labels) and sorted(own) == sorted(labels):
        raise ConfigError(
            f"data.label_names=[{','.join(labels)}]: are those of the score head of model.path in another order; set "
            f"data.label_names=[{','.join(own)}]"
        )
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: number for number, name in enumerate(labels)}


def return_token_scores(model: PreTrainedModel) -> None:
    """Change the class of a model for sequence classification in place, so that its forward is that of `TokenScores`.

    Raises ConfigError for a model without a score head on a decoder, such as an encoder with a pooled output.
    """
    head = model._modules.get(SCORE)
    if not isinstance(head, nn.Linear) or model.base_model_prefix not in model._modules:
        raise ConfigError(
            f"model.path: {type(model).__name__} is not a decoder with a score head ({SCORE}), which this recipe "
            "trains; choose a decoder such as Llama, Qwen3 or Mistral"
        )
    kind = type(model)
    model.__class__ = type(kind.__name__, (TokenScores, kind), {"__module__": kind.__module__})
