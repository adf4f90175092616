"""Checks a request to learn a document, and splits the document into chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.api.adapters.lookup import find_adapter
from coserve.api.http.parsing import local_path
from coserve.api.node import Node
from coserve.core.errors import InvalidRequest
from coserve.core.names import split_ref
from coserve.core.schemas.documents import DocumentJob, DocumentRequest, DocumentSettings, UserQuestion
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.types import BaseSpec, LoraSettings
from coserve.core.validation import check_one_given
from coserve.data.documents.encoder import unused_ids
from coserve.data.documents.lessons import least_questions
from coserve.data.documents.pending import PendingDocument
from coserve.data.documents.prompts import QUESTION_TOKENS, different
from coserve.data.documents.reading import Chunks, first_tokens, split_document
from coserve.data.offload.pool import HelperPool
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.lora.files.targets import resolve_targets

USUAL_CHUNK = 1024
USUAL_PREFIX, USUAL_MEMORY = 512, 128
"""Tokens of a cartridge, which then has about the bytes of a LoRA of rank 16; of each chunk with an encoder."""
INSTRUCTION_TOKENS = 256
"""Tokens reserved in the context for the instruction about a chunk."""
ELSEWHERE = ("data", "path", "columns", "teacher")
"""Fields of requests that train on rows; refused beside a document."""


@dataclass(frozen=True)
class CheckedDocument:
    """Settings with every value chosen."""

    settings: DocumentSettings
    chunk_tokens: int
    overlap_tokens: int
    prefix_tokens: int
    cartridge: LoraSettings | None = None
    """Settings of the new cartridge, if one is trained."""

    @property
    def tokens_at_once(self) -> int:
        """Most tokens of a row to learn, roughly: memory is planned with it until the rows are there."""
        return max(self.chunk_tokens, self.settings.answer_tokens + INSTRUCTION_TOKENS)

    def lora(self, lora: LoraSettings, base: BaseSpec) -> LoraSettings:
        """Return the settings of the adapter to train; of an encoder's memory tokens only the number is known yet."""
        return self._with_memory(lora, base, range(self.prefix_tokens))

    def with_prefix(
        self, lora: LoraSettings, chunks: Chunks, tokenizer: Tokenizer, base: BaseSpec, limit: int
    ) -> tuple[tuple[int, ...], LoraSettings]:
        """Return `JobSpec.prefix` of the chunks, and the settings of the adapter to train. `limit`: most tokens of a
        micro-batch. Raises `InvalidRequest`, also for questions that do not fit beside a chunk."""
        self._check_lengths(chunks, tokenizer, base)
        if lora.cartridge:
            prefix = first_tokens(chunks, lora.r, tokenizer)
            return prefix, msgspec.structs.replace(lora, r=len(prefix))
        if self.settings.recipe != "encoder":
            return (), lora
        count, rows = self.prefix_tokens, [tokenizer.encode(text) for text in chunks.texts]
        tokens = sum(map(len, rows)) + count * len(rows)
        if tokens > limit // 2:
            what = f"half of micro_batch_tokens ({limit}) for an encoder that reads the document in every step"
            raise InvalidRequest(f"expected at most {what}, got {tokens} tokens with its memory", field="document")
        most = _most_prefix(self.settings, base)
        ids = unused_ids([id for row in rows for id in row], count, base.vocab)
        if count * len(rows) > most or len(ids) < count:
            what = f"{most} memory tokens of {len(rows)} chunks, and {len(ids)} of a chunk"
            raise InvalidRequest(f"expected at most {what}, got {count} of each", field="document.prefix_tokens")
        return tuple(id for row in rows for id in (*row, *ids)), self._with_memory(lora, base, ids)

    def _check_lengths(self, chunks: Chunks, tokenizer: Tokenizer, base: BaseSpec) -> None:
        """Raise `InvalidRequest` if the instruction or one of the user's questions does not fit into the context."""
        settings, chunk = self.settings, min(self.chunk_tokens, chunks.tokens)
        given: list[tuple[str, str, str | None]] = [("instruction", "", None)]
        given += [(f"questions[{index}]", each.question, each.answer) for index, each in enumerate(settings.questions)]
        for field, question, answer in given:
            size = chunk + len(tokenizer.encode(f"{question}\n{settings.instruction}"))
            size += settings.answer_tokens if answer is None else len(tokenizer.encode(answer))
            if size > base.context:
                what = f"{base.context} tokens with a chunk and the answer"
                raise InvalidRequest(f"expected at most {what}, got {size}", field=f"document.{field}")

    def _with_memory(self, lora: LoraSettings, base: BaseSpec, ids: Sequence[int]) -> LoraSettings:
        if self.settings.recipe != "encoder":
            return lora
        (embedding,) = (name for name, site in base.ends.items() if site.layer < 0)
        tokens, decoder = {embedding: tuple(ids)}, self.settings.decoder_lora
        return msgspec.structs.replace(lora, trainable_token_indices=tokens, decoder=decoder)

    def job(self, chunks: Chunks) -> DocumentJob:
        count = len(chunks.texts)
        return DocumentJob(
            self.settings, chunks=count, tokens=chunks.tokens, digest=chunks.digest, done=count, total=count
        )


class DocumentSubmission:
    """Checks documents and reads them in helper processes."""

    def __init__(self, node: Node, helpers: HelperPool) -> None:
        self._config, self._registry, self._helpers = node.config, node.registry, helpers

    async def settings(self, request: FinetuneRequest, base: BaseSpec) -> CheckedDocument:
        """Return the settings with every value chosen. Raises `InvalidRequest`, `AdapterNotFound`, `BaseMismatch`."""
        asked = _given(request)
        training = request.training
        _refuse({name: getattr(request, name) for name in ELSEWHERE}, " beside a document")
        said = {"training.loss": training.loss, "training.train_on": training.train_on}
        _refuse(said, ": a document's recipe says it")
        _refuse({"training.one_row_per_answer": training.one_row_per_answer}, " beside a document")
        _refuse_unused(asked)
        most = _most_prefix(asked, base)
        generator, taken = asked.generator, 0
        if asked.generator_adapter is not None:
            name, version = split_ref(asked.generator_adapter)
            record = await find_adapter(self._registry, name, version, base, field="document.generator")
            generator, taken = f"adapter:{record.ref}", record.prefix
        size = asked.chunk_tokens or min(USUAL_CHUNK, base.context // 2)
        _check_most(size, most - taken, base, field="document.chunk_tokens")
        overlap = size // 8 if asked.overlap_tokens is None else asked.overlap_tokens
        if overlap >= size:
            raise InvalidRequest(f"expected less than a chunk's {size}, got {overlap}", field="document.overlap_tokens")
        usual = {"cartridge": min(USUAL_PREFIX, most), "encoder": USUAL_MEMORY}
        prefix = asked.prefix_tokens or usual.get(asked.recipe, 0)
        cartridge = None
        if asked.recipe == "cartridge":
            cartridge = _cartridge(request, prefix, most, base)
        elif asked.recipe == "encoder":
            _check_encoder(request, base)
        chosen = {field: getattr(asked, field) for field in DocumentSettings.__struct_fields__}
        chosen |= {"chunk_tokens": size, "overlap_tokens": overlap, "generator": generator}
        chosen |= {"prefix_tokens": prefix or None, "questions": _different(asked)}
        return CheckedDocument(DocumentSettings(**chosen), size, overlap, prefix, cartridge)

    async def split(self, request: FinetuneRequest, upload: Path | None, checked: CheckedDocument) -> PendingDocument:
        """Return the document's chunks. Raises `InvalidRequest`, `ForbiddenPath`, `UnreadableCorpus`, `EmptyCorpus`,
        `HelperLost`, `StorageError`."""
        asked = _given(request)
        check_one_given({"text": asked.text, "path": asked.path, "the part file": upload}, field="document")
        path = upload if asked.path is None else local_path(asked.path, self._config.data_root)
        source, text = None if path is None else str(path), (asked.text or "").encode()
        sizes = checked.chunk_tokens, checked.overlap_tokens
        return PendingDocument(await self._helpers.run(split_document, source, text, *sizes))


def _given(request: FinetuneRequest) -> DocumentRequest:
    document = request.document
    assert document is not None, "expected a document"
    return DocumentRequest(text=document) if isinstance(document, str) else document


def _refuse(fields: Mapping[str, object], why: str) -> None:
    """Raise `InvalidRequest` for the first of these fields, by path, that is given."""
    for name, value in fields.items():
        if value:
            raise InvalidRequest(f"expected it left out{why}", field=name)


def _refuse_unused(asked: DocumentSettings) -> None:
    """Raise `InvalidRequest` for a setting that has no effect beside the recipe, the generator or the questions."""
    recipe, own = asked.recipe, asked.questions
    unused: list[tuple[bool, str, tuple[str, ...]]] = [
        (recipe not in ("cartridge", "encoder"), "only a cartridge and an encoder have a prefix", ("prefix_tokens",)),
        (recipe != "encoder", "only an encoder has a decoder with LoRA", ("decoder_lora",)),
        (recipe == "lm", "recipe lm learns the text at weight 1", ("lm_weight",)),
        (recipe == "lm" and bool(own), "recipe lm learns no questions and evaluates all", ("holdout",)),
        (bool(own) and all(each.answer for each in own), "every question has its answer", ("generator",)),
        (bool(own), "your own questions replace generated ones", ("questions_per_chunk", "temperature")),
        (
            asked.generator == "none",
            "generator none asks and answers no questions",
            ("questions", "questions_per_chunk", "temperature", "instruction"),
        ),
    ]
    usual = DocumentSettings()
    for holds, why, names in unused:
        if holds:
            given = {f"document.{name}": getattr(asked, name) != getattr(usual, name) for name in names}
            _refuse(given, f": {why}")


def _different(asked: DocumentSettings) -> list[UserQuestion]:
    """Return the user's own questions, each once. Raises `InvalidRequest` for one without a word, and if too few are
    left to evaluate with."""
    for index, each in enumerate(asked.questions):
        if not re.search(r"\w", each.question):
            field = f"document.questions[{index}].question"
            raise InvalidRequest(f"expected words, got {each.question[:80]!r}", field=field)
    first = {each.question: each for each in reversed(asked.questions)}
    found = [first[text] for text in different(each.question for each in asked.questions)]
    if found and len(found) < (least := least_questions(asked)):
        alone = "" if least == 2 else ' (2 with publish "always")'
        message = f"expected at least {least} different questions{alone}, half of them to evaluate, got {len(found)}"
        raise InvalidRequest(message, field="document.questions")
    return found


def _most_prefix(settings: DocumentSettings, base: BaseSpec) -> int:
    """Return the tokens that may stand before a question."""
    return base.context - settings.answer_tokens - QUESTION_TOKENS - INSTRUCTION_TOKENS


def _check_most(tokens: int, most: int, base: BaseSpec, *, field: str) -> None:
    if tokens > most:
        what = f"the base's context of {base.context} tokens, less the prompt, answer_tokens and a generator's prefix"
        raise InvalidRequest(f"expected at most {most}, {what}, got {tokens}", field=field)


def _check_encoder(request: FinetuneRequest, base: BaseSpec) -> None:
    """Raise `InvalidRequest` for what an encoder's and a decoder's LoRA cannot be."""
    resolve_targets(LoraSettings(cartridge=True), base)
    _refuse({"continue_from": request.continue_from}, ": an encoder begins anew")
    if (lora := request.lora) is not None:
        _refuse({"lora.trainable_token_indices": lora.trainable_token_indices}, ": an encoder learns its memory tokens")
        given = {"lora.use_dora": lora.use_dora, "lora.bd_blocks": lora.bd_blocks > 1}
        _refuse(given, ": an encoder and its decoder have plain LoRA")
    patience = request.training.early_stopping_patience
    _refuse({"training.early_stopping_patience": patience is not None}, ": an encoder keeps its last weights")


def _cartridge(request: FinetuneRequest, tokens: int, most: int, base: BaseSpec) -> LoraSettings:
    """Return the settings of a new cartridge of `tokens` tokens, at most `most`. Raises `InvalidRequest`."""
    plus = {"training.lora_plus_ratio": request.training.lora_plus_ratio}
    given = {"lora": request.lora, "continue_from": request.continue_from, **plus}
    _refuse(given, ": a cartridge has no LoRA matrices")
    _check_most(tokens, most, base, field="document.prefix_tokens")
    settings = LoraSettings(r=tokens, cartridge=True)
    resolve_targets(settings, base)
    return settings
