"""The three pictures of the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.pages.plots import COLOURS, new_figure, short, styled
from examples.evidence.results import KINDS, Results, at_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict(zip(KINDS, (COLOURS[name] for name in ("s1", "s0", "s2", "s3", "s5", "s4", "s6", "s7")), strict=True))
_LINES = (":", "--", "-", "-.")  # by length, from the shortest


def _line(results: Results, name: str) -> dict[str, Any]:
    kind, length = name.rpartition("-")[0], results.one(name)["length"]
    return {"color": _COLOURS[kind], "linestyle": _LINES[results.lengths.index(length)]}


def _label(name: str) -> str:
    kind, _, length = name.rpartition("-")
    return f"{KINDS.get(kind, kind)} {length}"


@styled
def context(results: Results) -> Figure:
    """Bits of the same last tokens over the length of the sequence."""
    figure, axes = new_figure(7.2, 4.0)
    lengths = [one["tokens"] for one in results.first["context"] if not one["fitted"]]
    top, bottom = -math.inf, math.inf
    for name in results.trained():
        own = results.one(name)["length"]
        points = [(n, results.figures(name, at_length(n))) for n in lengths]
        within = [point for point in points if point[0] <= own]
        beyond = [point for point in points if point[0] >= own]
        top, bottom = max(top, within[0][1].mean), min([bottom, *(value.mean for _, value in within)])
        how = _line(results, name)
        axes.plot([n for n, _ in within], [v.mean for _, v in within], label=_label(name), linewidth=1.5, **how)
        axes.plot([n for n, _ in beyond], [v.mean for _, v in beyond], linewidth=1.0, alpha=0.35, **how)
        axes.plot(*[[x] for x in (own, within[-1][1].mean)], marker="o", markersize=4, color=how["color"])
        if len(points[0][1].values) > 1:
            low, high = ([v.mean + sign * v.spread for _, v in within] for sign in (-1, 1))
            axes.fill_between([n for n, _ in within], low, high, color=how["color"], alpha=0.12, linewidth=0)
    axes.set(xscale="log", xlabel="tokens in the sequence", ylabel="bits per byte")
    if bottom <= top:  # some run is drawn
        room = 0.08 * (top - bottom) or 0.01
        axes.set(ylim=(bottom - room, top + room))
    axes.set_xticks(lengths, [short(n) for n in lengths])
    axes.set_xticks([], minor=True)
    axes.grid()
    figure.legend(loc="outside upper left", ncols=4)
    return figure


@styled
def cost(results: Results) -> Figure:
    """Validation bits against tokens, FLOPs and seconds."""
    figure, panels = new_figure(10.2, 3.6, columns=3)
    per_step = {
        "million tokens": lambda r: r["settings"]["tokens_per_step"] / 1e6,
        "PFLOPs": lambda r: r["flops_per_step"] / 1e15,
        "seconds of training": lambda r: r["step_seconds"],
    }
    shown: list[float] = []
    for index, (axes, (unit, factor)) in enumerate(zip(panels, per_step.items())):
        for name in results.trained():
            curves = [record["curve"] for record in results.runs[name].values()]
            scale = results.figures(name, factor).mean
            points = [(some[0][0] * scale, sum(bits for _, bits in some) / len(some)) for some in zip(*curves)]
            label = _label(name) if index == 0 else None
            axes.plot(*zip(*points), label=label, linewidth=1.2, **_line(results, name))
            shown += [bits for _, bits in points[len(points) // 2 :]]
        axes.set(xlabel=unit)
        axes.grid()
    if shown:
        room = 0.05 * (max(shown) - min(shown)) or 0.01
        for axes in panels:
            axes.set(ylim=(min(shown) - room, max(shown) + room), xlim=(0, None))
    panels[0].set(ylabel="validation bits per byte")
    figure.legend(loc="outside upper left", ncols=4)
    return figure


@styled
def positions(results: Results) -> Figure:
    """Bits by position in the sequence, against the dense model of the same length on the same tokens.

    Text is harder here and easier there, which would hide what the models have to do with it. Where no dense model was
    trained, the dilated one takes its place.
    """
    lengths = [n for n in results.lengths[1:] if results.has(results.name("dilated", n))]
    figure, panels = new_figure(10.2, 3.4, columns=max(1, len(lengths)))
    panels = panels if len(lengths) > 1 else [panels]
    labelled: set[str] = set()
    for axes, length in zip(panels, lengths):
        names = {kind: results.name(kind, length) for kind in KINDS}
        reference = "dense" if results.has(names["dense"]) else "dilated"
        curves = [(KINDS[kind], names[kind], False, _COLOURS[kind]) for kind in KINDS]
        curves.append(("dilated without its longest branch", names["dilated"], True, COLOURS["limit"]))
        for label, name, without_reach, colour in curves:
            if not results.has(name):
                continue
            shares = []
            for seed, record in results.runs[name].items():
                found = (record["without_reach"] if without_reach else record)["positions"]
                base = results.runs[names[reference]].get(seed, results.one(names[reference]))["positions"]
                shares.append([100 * (bits / needed - 1) for bits, needed in zip(found, base)])
            mean = [sum(some) / len(some) for some in zip(*shares)]
            places = [(i + 0.5) * length / len(mean) for i in range(len(mean))]
            axes.plot(places, mean, color=colour, linewidth=1.2, label=None if label in labelled else label)
            labelled.add(label)
        axes.set(xlabel="position in the sequence", title=f"{short(length)}, against {KINDS[reference]}")
        axes.set_xticks([length * i // 4 for i in range(5)], [short(length * i // 4) for i in range(5)])
        axes.grid()
    panels[0].set(ylabel="more bits per byte (%)")
    if labelled:
        figure.legend(loc="outside upper left", ncols=4)
    return figure
