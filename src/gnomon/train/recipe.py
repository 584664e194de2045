"""`TrainRecipe`: all that a pre-training run is made of, as one TOML file; free of torch.

A run is a list of stages, each with a context length; the data position, the optimiser and the schedule go through all of them.
Read next: `loop.py`, which runs it; `recipes/` for complete ones.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnomon import config as toml
from gnomon.config import setting
from gnomon.data.cleaning import CleanConfig
from gnomon.data.long_context import LongConfig
from gnomon.data.pictures import PicturesConfig
from gnomon.errors import ConfigError
from gnomon.model.config import PRESETS, ModelConfig
from gnomon.parallel.axes import Axes
from gnomon.train.schedule import Schedule
from gnomon.train.settings import ActivationRule, BalanceConfig, MuonConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One part of the data mixture."""

    paths: tuple[str, ...] = setting((), "files, folders and globs; empty: the text found on this machine")
    weight: float = setting(1.0, "share of the tokens, relative to the other sources")
    text_field: str = setting("text", "field that holds the text in jsonl and parquet files")
    max_bytes: int | None = setting(None, "only with empty paths: bytes of text to take from this machine; none: all the default takes")
    pieces: int | None = setting(None, "cut documents into pieces of so many tokens, shuffled one by one; none: in one row, in order")
    long: LongConfig | None = setting(None, "strew evidence of small tasks over windows of this text (report §3.4); none: plain documents")
    clean: CleanConfig | None = setting(None, "throw out near copies, binary matter, logs and files cut off; none: equal texts only")
    pictures: PicturesConfig | None = setting(None, "pictures that a program makes, instead of text; needs [model.vision]")

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ConfigError(f"'weight' is {self.weight}; a share must not be negative")
        if self.max_bytes is not None and (self.paths or self.max_bytes <= 0):
            raise ConfigError(f"'max_bytes' is {self.max_bytes}; it must be positive and goes with empty 'paths' only")
        if self.pictures is not None and (self.paths or self.max_bytes or self.long is not None):
            raise ConfigError("'pictures' makes its own words; leave 'paths', 'max_bytes' and 'long' to a source of their own")
        if self.pieces is not None and (self.pieces < 2 or self.long is not None or self.pictures is not None):
            raise ConfigError(f"'pieces' is {self.pieces}; it must be at least 2, and is for sources of plain documents")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is read, and how it becomes tokens."""

    sources: tuple[SourceConfig, ...] = setting((SourceConfig(),), "parts of the mixture")
    tokenizer: Path | None = setting(None, "folder of a tokenizer; none: train one on the sources, of the model's vocab_size")
    held_out: float = setting(0.01, "share of the text that is kept out of training and evaluated on")
    cache: Path | None = setting(None, "folder of the tokenised shards; none: inside the run folder")

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("'sources' is empty; leave it out to train on the text of this machine")
        if self.tokenizer is None and not self.text_sources:
            raise ConfigError("'sources' holds no text to train a tokenizer on; add a source of text, or name a 'tokenizer'")
        if not 0 <= self.held_out <= 0.5:
            raise ConfigError(f"'held_out' is {self.held_out}; it is a share between 0 and 0.5")

    @property
    def text_sources(self) -> tuple[SourceConfig, ...]:
        """The sources that read text, in order."""
        return tuple(source for source in self.sources if source.pictures is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stretch of the run at one context length (report §3: 8K → 64K → 256K → 1M)."""

    context: int = setting(doc="tokens per row")
    steps: int | None = setting(None, "optimiser steps of the stage")
    tokens: int | None = setting(None, "tokens of the stage, instead of steps; rounded up to whole steps")
    long_exponent: float = setting(0.0, "documents are seen about (length/median)^exponent times per epoch; 0: once each")
    weights: tuple[float, ...] | None = setting(None, "shares of the sources in this stage; none: those of the sources")

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ConfigError(f"stage with context {self.context}: give either 'steps' or 'tokens'")
        if (self.steps or self.tokens or 0) <= 0 or self.context < 2:
            raise ConfigError(f"stage with context {self.context}: 'context' must be at least 2 and 'steps' or 'tokens' positive")
        if not 0 <= self.long_exponent <= 4:
            raise ConfigError(f"'long_exponent' is {self.long_exponent}; use 0 to 4")

    def num_steps(self, batch_tokens: int) -> int:
        """Optimiser steps of the stage."""
        return self.steps if self.steps is not None else -(-(self.tokens or 0) // batch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Loss on held-out text, by position, and bits per byte."""

    every: int = setting(0, "steps between evaluations; 0: only at the end")
    tokens: int = setting(65_536, "held-out tokens to read, rounded up to whole batches")
    contexts: tuple[int, ...] = setting((), "context lengths to evaluate at the end; empty: the last stage's and twice that")
    pictures: int = setting(200, "held-out pictures of each kind to answer about at the end")

    def __post_init__(self) -> None:
        if self.every < 0 or self.tokens < 1 or self.pictures < 1:
            raise ConfigError(f"'every' is {self.every}, 'tokens' is {self.tokens}, 'pictures' is {self.pictures}; use at least 0, 1 and 1")
        if any(context < 2 for context in self.contexts):
            raise ConfigError(f"'contexts' is {list(self.contexts)}; each must be at least 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When state is saved."""

    every_steps: int = setting(200, "optimiser steps between checkpoints; 0: by time only")
    every_seconds: float = setting(600.0, "seconds after which a checkpoint is due whatever the step; 0: by steps only")
    keep: int = setting(2, "checkpoints kept; older ones are removed after a newer one is whole")

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"'keep' is {self.keep}; at least one checkpoint must stay")
        if self.every_steps < 0 or self.every_seconds < 0:
            raise ConfigError("'every_steps' and 'every_seconds' must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe:
    """A pre-training run. Raises `ConfigError` for parts that do not fit together, naming field, value and remedy."""

    run: Path = setting(Path("runs/train"), "folder of the run: recipe, tokenizer, metrics, checkpoints, report")
    seed: int = setting(0, "decides the initial weights and the order of the data")
    model: ModelConfig = setting(doc="shape of the model; extends = \"tiny\" takes a preset")
    data: DataConfig = setting(DataConfig(), "text, tokenizer, mixture")
    stages: tuple[Stage, ...] = setting(doc="context lengths in order")
    batch_tokens: int = setting(16_384, "tokens per optimiser step, over all ranks; the one dial of batch size")
    micro_batch_tokens: int | None = setting(None, "tokens per forward pass and rank; none: all at once. Changes memory, not results")
    optimizer: MuonConfig = setting(MuonConfig(), "Per-Head Muon and AdamW")
    schedule: Schedule = setting(Schedule(), "learning rate over the run")
    balance: BalanceConfig = setting(BalanceConfig(), "load balance of the experts")
    precision: Literal["fp32", "bf16"] = setting("fp32", "fp32, or bf16 autocast with fp32 weights")
    activation_checkpointing: Literal["none", "block"] = setting("none", "block: keep only each layer's input and recompute the rest")
    activations: tuple[ActivationRule, ...] = setting((), "what becomes of saved tensors, by module; the last rule for a module counts")
    mesh: Axes = setting(Axes(), "how the ranks of a run share the work; by default all are copies")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to train; auto: the GPU where there is one")
    start_from: Path | None = setting(None, "run folder whose last weights and tokenizer are the start; none: from scratch")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "held-out loss")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "when state is saved")

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("'stages' is empty; give at least one, e.g. [[stages]] with context = 512 and steps = 200")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"'seed' is {self.seed}; use a number from 0 to 2^63 - 1")
        if self.batch_tokens < 1:
            raise ConfigError(f"'batch_tokens' is {self.batch_tokens}; it must be positive, and a multiple of each stage's context")
        self._check_mesh()
        seen = [(index, "pictures" if source.pictures else "long.pictures") for index, source in enumerate(self.data.sources)
                if source.pictures is not None or (source.long is not None and source.long.pictures)]
        if seen and self.model.vision is None:
            raise ConfigError(f"'data.sources.{seen[0][0]}.{seen[0][1]}' is given, but the model has no eye; add a [model.vision] table")
        for index, stage in enumerate(self.stages):
            self._check_stage(f"stages.{index}.context", stage)

    def _check_mesh(self) -> None:
        ranks, moe = self.mesh.expert, self.model.moe
        if ranks > 1 and (moe is None or moe.num_experts % ranks):
            held = "the model has no experts" if moe is None else f"{moe.num_experts} experts cannot be shared out evenly"
            raise ConfigError(f"'mesh.expert' is {ranks}, but {held}; use a divisor of the number of experts")

        if self.mesh.stages > self.model.num_hidden_layers:
            raise ConfigError(f"'mesh.pipeline' x 'mesh.virtual' is {self.mesh.stages} stages, but the model has "
                              f"{self.model.num_hidden_layers} layers; use {self.model.num_hidden_layers} or fewer")
        if self.mesh.pipeline > 1 and self.model.vision is not None:
            raise ConfigError("'mesh.pipeline' leaves the embedding to one rank, but 'model.vision' puts images in its place; "
                              "use data, expert or context ranks")
        if self.mesh.pipeline > 1 and self.balance.method == "auxiliary":
            raise ConfigError("'balance.method' is 'auxiliary', a loss of all layers, which a pipeline does not have in one place; "
                              "use 'quantile' or 'sign'")
        if self.mesh.pipeline > 1 and self.mesh.context > 1 and self.activation_checkpointing == "block":
            raise ConfigError("'activation_checkpointing' is 'block', which cannot go with both 'mesh.pipeline' and 'mesh.context'")

    def _check_stage(self, where: str, stage: Stage) -> None:
        taps = max((getattr(m, "short_conv_kernel_size", 0) for m in self.model.mixers.values()), default=0)
        if stage.context < taps:
            raise ConfigError(f"'{where}' is {stage.context}, shorter than the short convolution, which spans {taps} tokens; "
                              f"use at least {taps}")
        if stage.context < self.mesh.context:
            raise ConfigError(f"'{where}' is {stage.context}, less than one token for each of 'mesh.context' = {self.mesh.context} ranks")
        if self.batch_tokens % stage.context:
            multiple = -(-self.batch_tokens // stage.context) * stage.context
            raise ConfigError(f"'batch_tokens' is {self.batch_tokens}, no multiple of '{where}' = {stage.context}; use {multiple}")
        least = -(-stage.context // self.mesh.context)
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < least:
            shared = f" over {self.mesh.context} context ranks" if self.mesh.context > 1 else ""
            raise ConfigError(f"'micro_batch_tokens' is {self.micro_batch_tokens}, less than one row of '{where}' = "
                              f"{stage.context}{shared}; use at least {least}")
        if stage.weights is not None and len(stage.weights) != len(self.data.sources):
            name = where.removesuffix("context") + "weights"
            raise ConfigError(f"'{name}' has {len(stage.weights)} shares for {len(self.data.sources)} sources; give one each")

    @property
    def total_steps(self) -> int:
        """Optimiser steps of all stages."""
        return sum(stage.num_steps(self.batch_tokens) for stage in self.stages)

    def stage_at(self, step: int) -> tuple[int, Stage]:
        """Index and stage of a 0-based step; the last stage from its end on."""
        first = 0
        for index, stage in enumerate(self.stages):
            first += stage.num_steps(self.batch_tokens)
            if step < first:
                return index, stage
        return len(self.stages) - 1, self.stages[-1]

    def micro_batches(self, context: int, sharers: int) -> int:
        """Forward passes per step at a context length when that many ranks share the rows; raises `ConfigError` when they cannot evenly."""
        rows = self.batch_tokens // context
        if rows % sharers:
            raise ConfigError(f"'batch_tokens' = {self.batch_tokens} is {rows} rows of {context} tokens, which {sharers} ranks cannot "
                              f"share; use a multiple of {sharers * context}")
        own = rows // sharers
        most = own if self.micro_batch_tokens is None else max(1, self.micro_batch_tokens * self.mesh.context // context)
        fitting = (parts for parts in range(1, own + 1) if own % parts == 0 and own // parts <= most and self._keeps_busy(parts))
        found = next(fitting, None)
        if found is None:
            raise ConfigError(f"a step has {own} rows of {context} tokens for a pipeline of {self.mesh.stages} stages on "
                              f"{self.mesh.pipeline} ranks, which needs as many micro-batches as stages and a multiple of its ranks; "
                              f"use batch_tokens = {sharers * context * self.mesh.stages} or a multiple")
        return found

    def _keeps_busy(self, parts: int) -> bool:
        """Whether a pipeline's schedule can run so many micro-batches."""
        return self.mesh.pipeline == 1 or (parts >= self.mesh.stages and (self.mesh.virtual == 1 or parts % self.mesh.pipeline == 0))

    def evaluation_contexts(self) -> tuple[int, ...]:
        """Context lengths of the last evaluation."""
        last = self.stages[-1].context
        return self.evaluate.contexts or (last, 2 * last)


def load(path: Path, overrides: tuple[str, ...] = ()) -> TrainRecipe:
    """Read a recipe with overrides `a.b=c`; `[model] extends = "tiny"` takes a preset."""
    return toml.load(TrainRecipe, path, overrides, PRESETS)
