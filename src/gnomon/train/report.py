"""`report.html`: what a run did, on one page that needs no other file.

It is drawn from the run folder and the model, so it can be made again at any time. Read next: `charts.py`.
"""

import html
from collections.abc import Sequence
from pathlib import Path

import torch

from gnomon.model.transformer import Transformer
from gnomon.train import charts, metrics
from gnomon.train.evaluate import HeldOut, frozen
from gnomon.train.material import Material
from gnomon.units import format_count, format_seconds

DEPTH_TOKENS = 2048  # held-out tokens behind the depth-read figure

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ --ink:#26323f; --soft:#6b7783; --line:#e3e7ec; --accent:#2f6db5; }}
* {{ box-sizing:border-box }}
body {{ margin:0; background:#f5f7f9; color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }}
main {{ max-width:1180px; margin:0 auto; padding:32px 20px 60px }}
h1 {{ font-size:26px; margin:0 0 2px }} h2 {{ font-size:16px; margin:0 0 2px }}
p {{ margin:0; color:var(--soft) }}
.tiles {{ display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:12px; margin:22px 0 }}
.tile,.card {{ background:#fff; border:1px solid var(--line); border-radius:10px }} .tile {{ padding:12px 16px }}
.tile b {{ display:block; font-size:23px; font-weight:600 }} .tile span {{ color:var(--soft); font-size:13px }}
.grid {{ display:grid; grid-template-columns:repeat(auto-fit,minmax(440px,1fr)); gap:14px; align-items:start }}
.card {{ padding:16px 18px; overflow:hidden }} .wide {{ grid-column:1/-1 }} .card p {{ font-size:13px; margin-bottom:8px }}
pre {{ overflow:auto; font-size:12.5px; line-height:1.45; margin:10px 0 0 }} summary {{ cursor:pointer; font-weight:600 }}
table {{ border-collapse:collapse; width:100%; font-size:14px }}
td,th {{ padding:5px 8px; border-bottom:1px solid var(--line); text-align:right }}
td:first-child,th:first-child {{ text-align:left }}
@media (max-width:520px) {{ .grid {{ grid-template-columns:1fr }} }}
</style></head><body><main>
<h1>{title}</h1><p>{subtitle}</p>
<div class="tiles">{tiles}</div><div class="grid">{cards}</div></main></body></html>
"""


def write(run: Path, model: Transformer, material: Material, results: Sequence[HeldOut]) -> Path:
    """Draw the report of a run folder; returns its path."""
    rows = metrics.read(run)
    recipe = material.recipe
    parameters, active = recipe.model.num_parameters(), recipe.model.activated_parameters()
    subtitle = (f"{format_count(parameters)} parameters, {format_count(active)} active per token · {len(rows):,} steps · "
                f"{format_count(rows[-1]['tokens'])} tokens · {format_seconds(sum(r['seconds'] for r in rows))} of steps · "
                f"contexts {' → '.join(charts.context_length(s.context) for s in recipe.stages)}")
    page = PAGE.format(title=html.escape("Run " + "/".join(run.resolve().parts[-2:])), subtitle=html.escape(subtitle),
                       tiles="".join(_tile(*pair) for pair in _figures(rows, results)),
                       cards="".join(_cards(run, rows, model, material, results)))
    path, partial = run / "report.html", run / "report.html.partial"
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
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
    cards = [_card("Loss", "Cross-entropy of the next token. Dotted lines: the context length changes.", charts.loss(rows), wide=True)]
    if any(result.by_position for result in results):
        text = "Held-out documents that fill the whole context. No positions: the loss should not rise beyond the dotted line."
        cards.append(_card("Loss by position", text, charts.positions(results, max(s.context for s in recipe.stages))))
    if any(r["max_violation_by_layer"] for r in rows):
        text = f"How far the busiest expert is above the mean load, per layer; 0 is perfect. Method: {recipe.balance.method}."
        cards.append(_card("Load balance", text, charts.balance(rows)))
    depth = depth_read_weights(model, material)
    if depth:
        text = "Which earlier results each sublayer reads, averaged over held-out tokens. White: no such source."
        cards.append(_card("Depth reads", text, charts.depth_reads(depth)))
    speed = charts.curve(rows, "tokens_per_second", "tokens/s", smooth=True)
    cards.append(_card("Throughput", "Tokens per second, all ranks together.", speed))
    cards.append(_card("Learning rate", "Serves Muon and AdamW alike.", charts.curve(rows, "learning_rate", "learning rate")))
    cards.append(_card("Gradient norm", "Before clipping.", charts.curve(rows, "gradient_norm", "norm", smooth=True)))
    if any("max_logit" in r for r in rows):
        text = f"Largest attention logit of the latent-attention layers; clipped per head at {recipe.optimizer.clip_logits:g}."
        cards.append(_card("Attention logits", text, charts.curve([r for r in rows if "max_logit" in r], "max_logit", "largest logit")))
    if results:
        cards.append(_card("Held-out text", "Never trained on: documents chosen by a hash, or the ends of few documents.", _table(results)))
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


def _tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _card(title: str, text: str, body: str, *, wide: bool = False) -> str:
    return f'<section class="card{" wide" if wide else ""}"><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</section>'


def _table(results: Sequence[HeldOut]) -> str:
    rows = ((f"{r.context:,}", f"{r.loss:.4f}", f"{r.bits_per_byte:.4f}", f"{r.tokens:,}") for r in results)
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr><th>context</th><th>nats per token</th><th>bits per byte</th><th>tokens</th></tr>{cells}</table>"
