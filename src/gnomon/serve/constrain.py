"""Output that must match a JSON Schema or a regular expression: which ids may come next, through llguidance over our vocabulary.

A grammar is compiled once and copied for each request. Its mask is applied to the logits before anything is drawn, and output ends where
the grammar does, or when the ids that close an answer were sampled after it. Where the model thinks first, its words are free until the
request's `after` ids were sampled one after another.
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

LONGEST = 1 << 18
"""Characters of a grammar at most."""
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
        self._words = len(tokenizer.ranks)
        self._size = tokenizer.vocab_size
        self._tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=tokenizer.vocab_size,
                                                   eos_token=list(tokenizer.stop_ids))
        self._compiled: dict[tuple[str, str], LLMatcher] = {}
        self._turn = threading.Lock()

    def constraint(self, grammar: Grammar, stop_ids: frozenset[int]) -> Constraint:
        """A fresh constraint; where its grammar may end, `stop_ids` (or those of the vocabulary) end it.

        Raises `ConfigError` for a grammar that is too long, cannot be compiled, or that nothing can match, with the compiler's words.
        """
        key = grammar.kind, grammar.text
        matcher = self._compiled.get(key) or self._compile(grammar)
        with self._turn:
            self._compiled.pop(key, None)
            self._compiled[key] = matcher  # the last one used is the last one to go
            if len(self._compiled) > KEPT:
                del self._compiled[next(iter(self._compiled))]
            return Constraint(matcher.deep_copy(), grammar, stop_ids or self.stop_ids, (self._words, self._size))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if len(grammar.text) > LONGEST:
            raise ConfigError(f"'grammar' of kind {grammar.kind} has {len(grammar.text)} characters; {LONGEST} are allowed")
        if grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(grammar.text)
        elif grammar.kind == "lark":
            text = grammar.text
        else:
            schema = {"type": "object"} if grammar.kind == "json_object" else _parsed(grammar.text)
            options: Any = {"whitespace_pattern": rf"[ \t\n\r]{{0,{MAX_SPACE}}}", "whitespace_flexible": True}
            try:
                text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
            except ValueError as error:
                raise ConfigError(f"'grammar' of kind {grammar.kind} cannot be used: {str(error)[:300]}") from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        self._try(matcher, grammar)
        return matcher

    def _try(self, matcher: LLMatcher, grammar: Grammar) -> None:
        """Find the first mask, which is the dearest, and on a copy take a step: most grammars that fail at all fail there. Raises
        `ConfigError` for one that cannot be used."""
        if not matcher.is_error():
            ids = np.flatnonzero(_unpacked(matcher.compute_bitmask(), self._size))
            if not len(ids) and not matcher.is_accepting() and not matcher.is_error():
                raise ConfigError(f"'grammar' of kind {grammar.kind} cannot be used: nothing matches it")
            words = ids[ids < self._words]
            for step in words[:1].tolist() if not matcher.is_error() else ():
                trial, again = matcher.deep_copy(), matcher.deep_copy()
                trial.consume_token(step)
                if not trial.is_stopped():
                    trial.compute_bitmask()
                again.compute_bitmask()  # copies share what was found so far, and its limits
                matcher = trial if trial.is_error() else again
        if matcher.is_error():
            raise ConfigError(f"'grammar' of kind {grammar.kind} cannot be used: {_words_of(matcher, 500)}")


class Constraint:
    """Where one request's output stands in its grammar."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, stop_ids: frozenset[int], sizes: tuple[int, int]):
        self.stop_ids = stop_ids
        self._matcher, self._after, self._closes, (self._words, self._size) = matcher, grammar.after, grammar.closes, sizes
        self._marks = grammar.kind == "lark"
        self._seen: tuple[int, ...] = ()
        self._free = bool(grammar.after)
        self._framed = self._free and grammar.after[0] >= self._words  # thinking holds no markers, and the first one ends it
        self._forced: tuple[int, ...] = ()
        self._closed = False

    def allowed(self) -> Bits | None:
        """Which ids may come next; `None` while all may. Raises `ConfigError` when none may: the grammar is too complex to go on."""
        if self._forced or self._closed:
            return self._only(self._forced[:1] or tuple(self.stop_ids))
        if self._free:
            return self._thinking() if self._framed else None
        self._sound()
        ended = self._matcher.is_stopped()
        allowed = self._only(()) if ended else _unpacked(self._matcher.compute_bitmask(), self._size)
        self._sound()
        if self._marks:
            allowed[list(self.stop_ids)] = False
        else:
            allowed[self._words :] = False
        if self._matcher.is_accepting():
            allowed[list(self._closes[:1] or self.stop_ids)] = True
        if not allowed.any():
            raise ConfigError("the grammar cannot go on: no id may follow")
        return allowed

    def _only(self, ids: tuple[int, ...]) -> Bits:
        allowed = np.zeros(self._size, dtype=np.bool_)
        allowed[list(ids)] = True
        return allowed

    def _thinking(self) -> Bits:
        allowed = np.ones(self._size, dtype=np.bool_)
        allowed[self._words :] = False
        allowed[self._after[0]] = True
        return allowed

    def _sound(self) -> None:
        """Raise `ConfigError` with llguidance's words where it gave up."""
        if self._matcher.is_error():
            raise ConfigError(f"the grammar cannot go on: {_words_of(self._matcher, 300)}")

    def add(self, token: int) -> bool:
        """A token was sampled; whether the grammar is complete and nothing may follow. One that failed is not: `allowed` says so next."""
        if self._forced:
            self._forced = self._forced[1:]
        elif self._free:
            self._seen = (*self._seen, token)[-len(self._after) :]
            self._free = self._seen != self._after
            if self._framed and token == self._after[0]:
                self._free, self._forced = False, self._after[1:]
        elif self._closes and token == self._closes[0] and self._matcher.is_accepting():
            self._closed, self._forced = True, self._closes[1:]
        elif not self._closed:
            self._matcher.consume_token(token)
            return not self._closes and self._matcher.is_stopped() and not self._matcher.is_error()
        return False


def _words_of(matcher: LLMatcher, most: int) -> str:
    """Why a matcher gave up, without its inner state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:most] or "nothing matches it"


def _unpacked(mask: bytes, size: int) -> Bits:
    """A mask of llguidance, a bit for each id, as booleans."""
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little").astype(np.bool_)[:size]


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
    if schema is False:
        raise ConfigError("'grammar' is the JSON Schema false, which nothing matches")
    if schema is not True and not isinstance(schema, dict):
        raise ConfigError(f"'grammar' is {type(schema).__name__} where a JSON Schema is an object")
    return {} if schema is True else schema
