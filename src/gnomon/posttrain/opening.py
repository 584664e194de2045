"""What a recipe of `gnomon rl` names beside its settings, opened: agents with their servers, and the tournament with its judge.

Read next: `agentic.py`, `tournament.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gnomon.data.chat import chat_format
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.agentic import AgentSampler, AgentsConfig, AgentSource
from gnomon.posttrain.effort import Budgets
from gnomon.posttrain.keeping import fingerprint
from gnomon.posttrain.policy import AnySampler
from gnomon.posttrain.remote import RemoteSampler
from gnomon.posttrain.rl import SamplingConfig
from gnomon.posttrain.rollout import Rollout
from gnomon.posttrain.tournament import Tournament, TournamentConfig, lengths

Makes = Callable[[Transformer, int, Path, Mesh], AnySampler]


def agents(config: AgentsConfig, sampling: SamplingConfig, run: Path) -> tuple[AgentSource, Makes]:
    """The problems of agents, and what makes their sampler. Raises `ConfigError` where the run has no tokenizer, or names no servers."""
    if not (run / "tokenizer").is_dir() or sampling.remote is None:
        raise ConfigError("'agents' speak through the run's tokenizer to servers of 'train.sampling.remote'; both must be there")
    remote, source = sampling.remote, AgentSource(config, chat_format(Tokenizer.load(run / "tokenizer"), config.chat_format))

    def make(model: Transformer, version: int, folder: Path, mesh: Mesh) -> AgentSampler:
        servers = RemoteSampler(model, remote, folder, temperature=sampling.temperature, version=version, mesh=mesh)
        return AgentSampler(source, servers, folder)

    return source, make


def tournament(config: TournamentConfig, run: Path, cold: Transformer, measured: Callable[[], Sequence[Rollout]], mesh: Mesh) -> Tournament:
    """The tournament of a run. l0 comes from its file, or from what `measured` gives on every rank, rollouts of the cold start.

    Raises `ConfigError` for a file that belongs to other weights, or a run without tokenizer.
    """
    if not (run / "tokenizer").is_dir():
        raise ConfigError("'tournament' is judged in words, and the run has no tokenizer; start from a folder that has one")
    l0 = of_weights("tournament.lengths", config.lengths, cold, lambda name: lengths(measured(), name), mesh)
    return Tournament(config, Tokenizer.load(run / "tokenizer"), l0, mesh=mesh)


def of_weights(setting: str, path: Path | None, cold: Transformer, measured: Callable[[str], Budgets], mesh: Mesh) -> Budgets | None:
    """What belongs to the weights of a cold start: from its file, or `measured`, under the weights' name, and kept there. None without one.

    Raises `ConfigError`, naming the setting, for a file that belongs to other weights.
    """
    if path is None:
        return None
    name = fingerprint(cold)
    if not mesh.agree(path.exists()):
        found = measured(name)
        if mesh.is_main:
            found.save(path)
        return found
    known = Budgets.load(path)
    if known.measured_on != name:
        raise ConfigError(f"'{setting}' is {path}, measured on weights {known.measured_on}, but the cold start has {name}; name the "
                          "checkpoint that it was measured on as 'cold_start', or another file, to measure anew")
    return known
