"""What a run is fed with: its tokenizer, its token shards, and the stream of batches over them.

The first rank prepares, the others wait and open what it wrote; a second start of the same run finds everything done.
Read next: `gnomon/data/packing.py`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from gnomon.data.corpus import Corpus, hold_out, open_corpus
from gnomon.data.images import ImageLimits
from gnomon.data.long_context import LongContext
from gnomon.data.machine_text import DEFAULT_BYTES, default_corpus
from gnomon.data.mixture import ItemSource, Mixture
from gnomon.data.packing import PackedBatches
from gnomon.data.picture_code import ALL_KINDS
from gnomon.data.pictures import Pictures, PicturesConfig
from gnomon.data.shards import Pieces, Shards, write_shards
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError
from gnomon.parallel.axes import ROWS
from gnomon.parallel.mesh import Mesh
from gnomon.train.recipe import SourceConfig, TrainRecipe

TOKENIZER_CHARACTERS = 32_000_000  # text that a tokenizer is trained on; more changes little

TOKENIZER_PICTURES = 200  # pictures of each kind whose words a tokenizer is trained on

HELD_OUT_SEED = 1 << 32  # added to the seed of long samples and pictures that are only evaluated on

Say = Callable[[str], None]
"""Tells the user one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """A prepared run: the recipe with the tokenizer's ids filled in, and the data of each source of text."""

    recipe: TrainRecipe
    tokenizer: Tokenizer
    train: tuple[Shards, ...]
    held_out: tuple[Shards, ...]


def prepare(recipe: TrainRecipe, mesh: Mesh, say: Say, *, show_progress: bool) -> Material:
    """Make or find tokenizer and shards. Raises `ConfigError` when vocabulary and model differ, `DataError` for unusable text."""
    corpora = [_corpus(source) for source in recipe.data.text_sources] if mesh.is_main else []
    if mesh.is_main:
        _provide_tokenizer(recipe, corpora, say)
        tokenizer = Tokenizer.load(recipe.run / "tokenizer")
        _check_vocabulary(tokenizer, recipe)
        _check_start(tokenizer, recipe)
        cache = recipe.data.cache or recipe.run / "data"
        folders = [write_shards(c, tokenizer, cache, held_out=recipe.data.held_out, progress=show_progress) for c in corpora]
        (recipe.run / "data.txt").write_text("".join(f"{folder.resolve()}\n" for folder in folders))
    mesh.wait()
    tokenizer = Tokenizer.load(recipe.run / "tokenizer")
    folders = shard_folders(recipe.run)
    model = recipe.model
    model = replace(model, bos_token_id=_either(model.bos_token_id, tokenizer.bos_id),
                    eos_token_id=_either(model.eos_token_id, tokenizer.eos_id),
                    pad_token_id=_either(model.pad_token_id, tokenizer.pad_id))
    return Material(
        recipe=replace(recipe, model=model), tokenizer=tokenizer, train=tuple(Shards.open(folder) for folder in folders),
        held_out=tuple(Shards.open(folder, "held_out") for folder in folders) if recipe.data.held_out else (),
    )


def shard_folders(run: Path) -> list[Path]:
    """Where the token shards of a prepared run are, one folder per source."""
    return [Path(line) for line in (run / "data.txt").read_text().splitlines()]


def _either(given: int | None, default: int) -> int:
    return default if given is None else given


def stream(material: Material, mesh: Mesh) -> PackedBatches:
    """The batches of this rank, shaped for the first stage."""
    recipe, stage, text = material.recipe, material.recipe.stages[0], iter(material.train)
    pairs: list[tuple[ItemSource | Shards | Pieces, float]] = []
    for source in recipe.data.sources:
        if source.pictures is not None:
            pairs.append((_pictures(material, source.pictures), source.weight))
        elif source.long is not None:
            pairs.append((LongContext(next(text), material.tokenizer, source.long, _limits(material)), source.weight))
        else:
            pairs.append((next(text) if source.pieces is None else Pieces(next(text), source.pieces), source.weight))
    mixture = Mixture(pairs, recipe.seed)
    rows = recipe.batch_tokens // stage.context
    return PackedBatches(mixture, rows, stage.context, mesh.index(*ROWS), mesh.size(*ROWS), pad_id=material.tokenizer.pad_id)


def picture_questions(material: Material) -> dict[str, Pictures]:
    """Held-out pictures by kind, those of all sources that make some: others than those trained on, as plain documents."""
    found = {}
    for source in material.recipe.data.sources:
        for kind in source.pictures.kinds if source.pictures is not None else ():
            assert source.pictures is not None
            apart = replace(source.pictures, kinds=(kind,), chat=0.0, seed=source.pictures.seed + HELD_OUT_SEED)
            found[kind] = _pictures(material, apart)
    return found


def _pictures(material: Material, config: PicturesConfig) -> Pictures:
    limits = _limits(material)
    assert limits is not None  # the recipe was checked
    return Pictures(material.tokenizer, config, limits, (material.recipe.data.cache or material.recipe.run / "data") / "renderings")


def _limits(material: Material) -> ImageLimits | None:
    vision = material.recipe.model.vision
    return None if vision is None else ImageLimits(patch_size=vision.patch_size, merge_size=vision.merge_size)


def long_questions(material: Material) -> list[LongContext]:
    """Held-out long samples of each source that strews evidence: other text and other tasks than those trained on."""
    pairs = [(shards, source.long) for shards, source in zip(material.held_out, material.recipe.data.text_sources, strict=False)]
    return [LongContext(shards, material.tokenizer, replace(long, seed=long.seed + HELD_OUT_SEED, window=None), _limits(material))
            for shards, long in pairs if long is not None and long.strewn]


def _corpus(source: SourceConfig) -> Corpus:
    if source.paths:
        return open_corpus(source.paths, source.text_field, source.clean)
    return replace(default_corpus(source.max_bytes or DEFAULT_BYTES), clean=source.clean)


def _provide_tokenizer(recipe: TrainRecipe, corpora: list[Corpus], say: Say) -> None:
    """Put a tokenizer into the run folder unless one is there: the given one, that of `start_from`, or a new one."""
    target, partial = recipe.run / "tokenizer", recipe.run / "tokenizer.partial"
    if target.is_dir():
        return
    shutil.rmtree(partial, ignore_errors=True)
    given = recipe.data.tokenizer or (recipe.start_from / "tokenizer" if recipe.start_from else None)
    if given is not None:
        tokenizer = Tokenizer.load(given)
    else:
        say(f"training a tokenizer of {recipe.model.vocab_size} ids")
        tokenizer = train_tokenizer(chain(_picture_words(recipe), _sample(corpora, recipe.data.held_out)), recipe.model.vocab_size)
    tokenizer.save(partial)
    partial.rename(target)


def _picture_words(recipe: TrainRecipe) -> Iterator[str]:
    """What is said about some pictures of each source, so that its words get tokens; what is spelled needs none."""
    for source in recipe.data.sources:
        for kind in dict.fromkeys(source.pictures.kinds if source.pictures is not None else ()):
            for index in range(TOKENIZER_PICTURES):
                shown = ALL_KINDS[kind](np.random.Generator(np.random.Philox(key=HELD_OUT_SEED, counter=[0, 0, 1, index])))
                yield f"{shown.question} {'' if shown.spelled else shown.answer}\n"


def _sample(corpora: list[Corpus], held_out: float) -> Iterator[str]:
    """Training text from the start of each corpus, an equal budget each."""
    for corpus in corpora:
        left = TOKENIZER_CHARACTERS // len(corpora)
        for document, kept_out in hold_out(corpus, held_out):
            if kept_out:
                continue
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                break


def _check_vocabulary(tokenizer: Tokenizer, recipe: TrainRecipe) -> None:
    if tokenizer.vocab_size != recipe.model.vocab_size:
        raise ConfigError(f"'model.vocab_size' is {recipe.model.vocab_size}, but the tokenizer has {tokenizer.vocab_size} ids; "
                          f"set model.vocab_size={tokenizer.vocab_size}, or use another tokenizer and run folder")


def _check_start(tokenizer: Tokenizer, recipe: TrainRecipe) -> None:
    """Weights mean something only with the ids that they were trained on."""
    first = recipe.start_from / "tokenizer" if recipe.start_from else None
    if first is not None and first.is_dir() and Tokenizer.load(first).fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"'start_from' names {recipe.start_from}, whose weights belong to another tokenizer than this run's; "
                          "leave out data.tokenizer, or use another run folder")
