"""`report.html`: what a run did, on one page that needs no other file.

It is drawn from the run folder and the model, so it can be made again at any time. Read next: `charts.py`.
"""

import html
from collections.abc import Sequence
from pathlib import Path

import torch

from gnomon import whole
from gnomon.model.transformer import Transformer
from gnomon.train import charts, metrics
from gnomon.train.canvas import PAGE, card, context_length, tile
from gnomon.train.evaluate import HeldOut, frozen
from gnomon.train.material import Material
from gnomon.units import format_count, format_seconds

DEPTH_TOKENS = 2048  # held-out tokens behind the depth-read figure


def write(run: Path, model: Transformer, material: Material, results: Sequence[HeldOut]) -> Path:
    """Draw the report of a run folder; returns its path."""
    rows = metrics.read(run)
    recipe = material.recipe
    parameters, active = recipe.model.num_parameters(), recipe.model.activated_parameters()
    subtitle = (f"{format_count(parameters)} parameters, {format_count(active)} active per token · {len(rows):,} steps · "
                f"{format_count(rows[-1]['tokens'])} tokens · {format_seconds(sum(r['seconds'] for r in rows))} of steps · "
                f"contexts {' → '.join(context_length(s.context) for s in recipe.stages)}")
    page = PAGE.format(title=html.escape("Run " + "/".join(run.resolve().parts[-2:])), subtitle=html.escape(subtitle),
                       tiles="".join(tile(*pair) for pair in _figures(rows, results)),
                       cards="".join(_cards(run, rows, model, material, results)))
    path = run / "report.html"
    whole.write(path, page)
    return path


def _figures(rows: charts.Rows, results: Sequence[HeldOut]) -> list[tuple[str, str]]:
    tail = rows[-max(1, len(rows) // 20) :]
    pairs = [("training loss, last 5 %", f"{sum(r['loss'] for r in tail) / len(tail):.3f}")]
    if results:
        pairs += [("held-out loss", f"{results[0].loss:.3f}"), ("held-out bits per byte", f"{results[0].bits_per_byte:.3f}")]
    speed = sorted(r["tokens_per_second"] for r in rows)[len(rows) // 2]
    pairs.append(("tokens per second, median", f"{speed:,.0f}"))
    if any(r["max_violation_by_layer"] for r in rows):
        pairs.append(("MaxVio, last 5 %, worst layer", f"{sum(r['max_violation'] for r in tail) / len(tail):.2f}"))
    return pairs


def _cards(run: Path, rows: charts.Rows, model: Transformer, material: Material, results: Sequence[HeldOut]) -> list[str]:
    recipe = material.recipe
    cards = [card("Loss", "Cross-entropy of the next token. Dotted lines: the context length changes.", charts.loss(rows), wide=True)]
    if any(result.by_position for result in results):
        text = "Held-out documents that fill the whole context. No positions: the loss should not rise beyond the dotted line."
        cards.append(card("Loss by position", text, charts.positions(results, max(s.context for s in recipe.stages))))
    if any(r["max_violation_by_layer"] for r in rows):
        text = f"How far the busiest expert is above the mean load, per layer; 0 is perfect. Method: {recipe.balance.method}."
        cards.append(card("Load balance", text, charts.balance(rows)))
    depth = depth_read_weights(model, material)
    if depth:
        text = "Which earlier results each sublayer reads, averaged over held-out tokens. White: no such source."
        cards.append(card("Depth reads", text, charts.depth_reads(depth)))
    speed = charts.curve(rows, "tokens_per_second", "tokens/s", smooth=True)
    cards.append(card("Throughput", "Tokens per second, all ranks together.", speed))
    cards.append(card("Learning rate", "Serves Muon and AdamW alike.", charts.curve(rows, "learning_rate", "learning rate")))
    cards.append(card("Gradient norm", "Before clipping.", charts.curve(rows, "gradient_norm", "norm", smooth=True)))
    if any("max_logit" in r for r in rows):
        text = f"Largest attention logit of the latent-attention layers; clipped per head at {recipe.optimizer.clip_logits:g}."
        cards.append(card("Attention logits", text, charts.curve([r for r in rows if "max_logit" in r], "max_logit", "largest logit")))
    if results:
        cards.append(card("Held-out text", "Never trained on: documents chosen by a hash, or the ends of few documents.", _table(results)))
    if any(r.kinds for r in results):
        longest = max(s.context for s in recipe.stages)
        text = "Share of the pieces of evidence that answers hold, by how far back a piece stands. Dotted: the longest window trained on."
        cards.append(card("Scattered evidence", text, charts.distances(results, longest) + _kinds_table(results)))
    if results and results[0].pictures:
        text = "Pictures never trained on; an answer counts if it is right to the last letter."
        cards.append(card("Pictures", text, _picture_table(results[0])))
    recipe_text = html.escape((run / "recipe.toml").read_text(encoding="utf-8"))
    cards.append(f'<section class="card wide"><details><summary>Recipe</summary><pre>{recipe_text}</pre></details></section>')
    return cards


@torch.no_grad()
def depth_read_weights(model: Transformer, material: Material) -> list[tuple[str, list[float]]]:
    """Mean probabilities of each depth read over some text: held out where there is some, else trained on."""
    shards = (material.held_out or material.train)[0]
    tokens: list[int] = []
    for index in range(len(shards)):
        tokens += shards[index][: DEPTH_TOKENS - len(tokens)].tolist()
        if len(tokens) >= DEPTH_TOKENS:
            break
    device = next(model.parameters()).device
    with frozen(model):
        reads = model.depth_read_weights(torch.tensor(tokens, device=device).unsqueeze(0))
    return [(name, weights.tolist()) for name, weights in reads]


def _table(results: Sequence[HeldOut]) -> str:
    asked = any(r.answers is not None for r in results)
    head = ("context", "nats per token", "bits per byte", "tokens", *(("scattered evidence: answered",) if asked else ()))
    rows = ((f"{r.context:,}", f"{r.loss:.4f}", f"{r.bits_per_byte:.4f}", f"{r.tokens:,}",
             *(("" if r.answers is None else f"{r.answers:.0%}",) if asked else ())) for r in results)
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{cells}</table>"


def _kinds_table(results: Sequence[HeldOut]) -> str:
    """Whole answers right, by kind of task and length of window."""
    asked = [r for r in results if r.kinds]
    kinds = list(dict.fromkeys(kind for r in asked for kind in r.kinds))
    head = "".join(f"<th>{name}</th>" for name in ("context", *map(html.escape, kinds)))
    rows = "".join(f"<tr><td>{r.context:,}</td>" + "".join(f"<td>{r.kinds[k][0]:.0%}</td>" if k in r.kinds else "<td></td>" for k in kinds)
                   + "</tr>" for r in asked)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _picture_table(result: HeldOut) -> str:
    cells = "".join(f"<tr><td>{html.escape(kind)}</td><td>{share:.1%}</td><td>{asked:,}</td></tr>"
                    for kind, (share, asked) in result.pictures.items())
    return f"<table><tr><th>kind</th><th>answered right</th><th>asked</th></tr>{cells}</table>"
