"""Output that must match a JSON Schema or a regular expression: which ids may come next, through llguidance over our vocabulary.

A grammar is compiled once and copied for each request. Its mask is applied to the logits before anything is drawn, and output ends where
the grammar does. Where the model thinks first, its tokens are free until the request's `after` ids were sampled one after another.
Read next: `sampler.py`.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.serve.request import Grammar
from gnomon.serve.sampler import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SPACE = 64
"""Spaces and newlines that may stand between two parts of JSON: enough to indent, too few to go on for ever."""
KEPT = 64
"""Compiled grammars that are kept for the next request with the same text."""


class Grammars:
    """Compiles grammars over one vocabulary. Raises `ConfigError` where llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer):
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise ConfigError("constrained output needs llguidance: pip install 'gnomon[serve]'") from None
        self.stop_ids = frozenset(tokenizer.stop_ids)
        self._sizes = len(tokenizer.ranks), tokenizer.vocab_size
        self._tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=tokenizer.vocab_size,
                                                   eos_token=list(tokenizer.stop_ids))
        self._compiled: dict[tuple[str, str], LLMatcher] = {}
        self._turn = threading.Lock()

    def constraint(self, grammar: Grammar, stop_ids: frozenset[int]) -> Constraint:
        """A fresh constraint; where its grammar may end, `stop_ids` (or those of the vocabulary) end it.

        Raises `ConfigError` for a grammar that cannot be compiled, with the compiler's words.
        """
        key = grammar.kind, grammar.text
        matcher = self._compiled.get(key) or self._compile(grammar)
        with self._turn:
            self._compiled.pop(key, None)
            self._compiled[key] = matcher  # the last one used is the last one to go
            if len(self._compiled) > KEPT:
                del self._compiled[next(iter(self._compiled))]
            return Constraint(matcher.deep_copy(), grammar, stop_ids or self.stop_ids, self._sizes)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(grammar.text)
        else:
            schema = {"type": "object"} if grammar.kind == "json_object" else _parsed(grammar.text)
            options: Any = {"whitespace_pattern": rf"[ \t\n\r]{{0,{MAX_SPACE}}}", "whitespace_flexible": True}
            text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"'grammar' of kind {grammar.kind} cannot be used: {' '.join(matcher.get_error().split())[:500]}")
        return matcher


class Constraint:
    """Where one request's output stands in its grammar."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, stop_ids: frozenset[int], sizes: tuple[int, int]):
        self.stop_ids = stop_ids
        self._matcher, self._after, (self._reserved, self._size) = matcher, grammar.after, sizes
        self._seen: tuple[int, ...] = ()
        self._free = bool(grammar.after)

    def allowed(self) -> Bits | None:
        """Which ids may come next; `None` while all may. Raises `ConfigError` when none may: the grammar is too complex to go on."""
        if self._free:
            return None
        self._sound()
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little").astype(np.bool_)[: self._size]
        allowed[self._reserved :] = False
        if self._matcher.is_accepting():
            allowed[list(self.stop_ids)] = True
        self._sound()
        if not allowed.any():
            raise ConfigError("the grammar cannot go on: no id may follow")
        return allowed

    def _sound(self) -> None:
        """Raise `ConfigError` with llguidance's words where it gave up."""
        if self._matcher.is_error():
            raise ConfigError(f"the grammar cannot go on: {' '.join(self._matcher.get_error().split())[:300]}")

    def add(self, token: int) -> bool:
        """A token was sampled; whether the grammar is complete and nothing may follow. One that failed is not: `allowed` says so next."""
        if self._free:
            self._seen = (*self._seen, token)[-len(self._after) :]
            self._free = self._seen != self._after
            return False
        self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()


class _Vocabulary:
    """Our tokenizer in the words of llguidance's wrapper."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = list(range(len(tokenizer.ranks), tokenizer.vocab_size))
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id

    def __call__(self, text: bytes | str) -> list[int]:
        return self.tokenizer.encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"'grammar' is not JSON: {error}; give a JSON Schema as JSON text") from None
    if not isinstance(schema, (dict, bool)):
        raise ConfigError(f"'grammar' is {type(schema).__name__} where a JSON Schema is an object")
    return schema
