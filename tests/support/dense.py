"""The dense reference: Hugging Face's model, with attention by the rule over the oracle.

It has no pages, ring, chunks or batches: one sequence, one pass, keys and values quantised and
dequantised in place. What it shares with the product is the record format alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvq_kernels import AttentionParams, Format, reference
from support.fp8 import Fp8Layer
from support.paged import Sequence as PagedSequence
from support.paged import attend_by_the_rule

_ATTENTION = "kvq_dense"

TIE = 0.005
"""Log probabilities closer than this count as equal.

The engine's keys differ from the dense model's in the last bit, because its matrix products
sum in another order. Now and then that rounds a key to the next code, so the two models'
log probabilities differ by about 1e-3 (measured here: at most 0.012), and a tie can fall either
way. Untrained models on repetitive text amplify it far more; the prompts here are no such text.
"""
FormatOfLayer = Callable[[Any], Format | Fp8Layer | None]


@dataclass
class DenseResult:
    """What the dense model says about tokens that an engine generated.

    Attributes:
        mismatches: tokens to which the dense model prefers another, by more than :data:`TIE`.
        logprobs: its log probability of each token, one list per prompt.

    """

    mismatches: int
    logprobs: list[list[float]]


class DenseModel:
    """A causal language model whose layers see a quantised past."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        format_of_layer: FormatOfLayer | Format | Fp8Layer | None,
    ) -> None:
        """Load the model.

        Args:
            model: Hugging Face folder.
            format_of_layer: the format of every layer, or a function from the attention module
                to its format; None is an unquantised layer.

        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _dispatch)
        self._format_of = (
            format_of_layer if callable(format_of_layer) else lambda module: format_of_layer
        )
        text_only = type(AutoConfig.from_pretrained(model)) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto_class = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
        self.model = auto_class.from_pretrained(
            model, dtype=torch.float32, attn_implementation=_ATTENTION
        ).eval()
        for module in self.model.modules():
            module._kvq_owner = (self,)  # in a tuple, so that it is no submodule

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Log probabilities of what follows each token, ``[num_tokens, vocabulary]``."""
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Log probabilities of every prompt's tokens but its first."""
        return [
            self.logprobs(prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            for prompt in prompts
        ]

    def judge(
        self, prompts: Sequence[list[int]], continuations: Sequence[list[int]]
    ) -> DenseResult:
        """Compare greedy continuations with this model's own choices."""
        mismatches, logprobs = 0, []
        for prompt, tokens in zip(prompts, continuations, strict=True):
            choices = self.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
            generated = choices.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            mismatches += int((choices.amax(-1) - generated > TIE).sum())
            logprobs.append(generated.tolist())
        return DenseResult(mismatches, logprobs)

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        params = AttentionParams(scaling, softcap, sliding_window, s_aux)
        rows = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_size]
        sequence = PagedSequence(*rows)
        fmt = self._format_of(module)
        if isinstance(fmt, Fp8Layer):
            keys, values = fmt.fake_quantise(sequence.key, sequence.value)
            return reference.attention(sequence.query, keys, values, params, 0, 0)[None], None
        return attend_by_the_rule(sequence, fmt, params)[None], None


def _dispatch(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    owner: DenseModel = module._kvq_owner[0]  # type: ignore[assignment, index]
    return owner._attention(module, *args, **kwargs)
