"""The state of one request in flight: its choices, its times, and the chunks of its response."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from coserve.api.generation.choice_decoder import ChoiceDecoder, ChoiceDelta
from coserve.api.generation.output_queue import OutputQueue
from coserve.api.generation.stop_tokens import stop_texts, stop_tokens
from coserve.core.schemas.generation import GenerateChunk, GenerateRequest, Timing, Usage, token_usage
from coserve.core.types import AdapterRef
from coserve.data.pretrained.tokenizer import Tokenizer


@dataclass
class RequestState:
    """One request. Each choice is one sequence in the engine; times are seconds on the caller's clock."""

    id: str
    adapter: AdapterRef | None
    prompt: tuple[int, ...]
    seed: int
    arrived: float
    decoders: dict[str, ChoiceDecoder]
    """Decoders by sequence id, in the order of the choices."""
    show_prompt_ids: bool
    """Whether the next chunk of choice 0 has the prompt's token ids."""
    outputs: OutputQueue = field(default_factory=OutputQueue)
    together: Sequence[RequestState] = ()
    """All requests of the same call, this one included. If one is refused, all end."""
    refused: bool = False
    """Whether the engine refused a sequence of these requests: its queue was full, or the deadline could not be met."""
    admitted: float | None = None
    cached: int = 0
    """Tokens of the prompt that the first admitted sequence found in the prefix cache."""
    finished: dict[str, str] = field(default_factory=dict)
    """Finish reasons of the sequences that have ended."""
    first_token: dict[str, float] = field(default_factory=dict)
    last_token: dict[str, float] = field(default_factory=dict)
    """Time of each sequence's latest token."""

    def timing(self, now: float) -> Timing:
        queue = None if self.admitted is None else self.admitted - self.arrived
        first = min(self.first_token.values(), default=now)
        return Timing(queue=queue, ttft=first - self.arrived, e2e=now - self.arrived)

    def usage(self) -> Usage:
        prompt, completion = len(self.prompt), sum(decoder.count for decoder in self.decoders.values())
        return token_usage(prompt, completion, self.cached)

    def chunk(self, sequence: str, delta: ChoiceDelta, now: float, *, last: bool) -> GenerateChunk:
        """Return the chunk that sends `delta`; the last chunk of the whole response has usage and timing."""
        index = list(self.decoders).index(sequence)
        with_prompt_ids = self.show_prompt_ids and index == 0
        self.show_prompt_ids = self.show_prompt_ids and not with_prompt_ids
        return GenerateChunk(
            id=self.id,
            adapter=self.adapter.id if self.adapter else None,
            version=self.adapter.version if self.adapter else None,
            seed=self.seed,
            index=index,
            text=delta.text,
            token_ids=list(delta.token_ids),
            finish_reason=delta.finished.value if delta.finished else None,
            stop_reason=delta.stop_reason,
            logprobs=None if delta.logprobs is None else list(delta.logprobs),
            prompt_token_ids=list(self.prompt) if with_prompt_ids else None,
            prompt_logprobs=None if delta.prompt_logprobs is None else list(delta.prompt_logprobs),
            cached_tokens=self.cached if with_prompt_ids else None,
            usage=self.usage() if last else None,
            timing=self.timing(now) if last else None,
        )


def new_state(
    id: str,
    request: GenerateRequest,
    prompt: tuple[int, ...],
    adapter: AdapterRef | None,
    tokenizer: Tokenizer,
    arrived: float,
) -> RequestState:
    """Return the state of a request before its first token. A seed is drawn unless the request has one."""
    seed = secrets.randbits(31) if request.seed is None else request.seed
    prepended = None
    if isinstance(request.prompt, str):
        prepended = tokenizer.prepended if request.add_special_tokens else 0
    texts, tokens = stop_texts(request), stop_tokens(request, tokenizer)
    decoders = {
        f"{id}-{index}": ChoiceDecoder(
            tokenizer,
            prompt,
            stops=texts,
            stop_tokens=tokens,
            min_tokens=request.min_tokens,
            logprobs=request.logprobs is not None,
            prompt_logprobs=index == 0 and request.prompt_logprobs is not None,
            prepended=prepended,
            include_stop=request.include_stop_str_in_output,
            skip_special=request.skip_special_tokens,
        )
        for index in range(request.n)
    }
    return RequestState(id, adapter, prompt, seed, arrived, decoders, request.return_prompt_ids)
