"""Where a model looks on a slide: one weight per tile, as a picture and as GeoJSON for QuPath."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.models.attention_map import Rows, attention_map, gradient_map
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.pages import plots
from dilated_attention_pytorch.slides.features import TILE, Bag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["attention", "gradient", "pooling"]


def tile_weights(model: LongNetEncoder, bag: Bag, kind: Kind = "attention", output: int | None = None) -> Tensor:
    """The weight of each tile, `(n,)`, which add up to 1; the model is in `eval()`.

    - `attention`: the attention that a tile gets from all rows, or from the CLS rows of a model that pools these; the
      mean over layers and heads;
    - `gradient`: what a tile adds to an output, by gradient times attention; negative shares count as 0. `output` is
      the number of the output, from 0, by default that of the largest;
    - `pooling`: the weight of its row in the attention pool.
    """
    outputs = model.config.num_classes
    if output is not None and kind != "gradient":
        raise ValueError(f"--class-number {output} belongs to --kind gradient, got --kind {kind}: leave it out")
    if kind == "gradient" and not outputs:
        raise ValueError("this model has no outputs, as after `slides pretrain`: use --kind attention")
    if output is not None and not 0 <= output < outputs:
        raise ValueError(
            f"--class-number must be from 0 to {outputs - 1}, as this model has {outputs} outputs: got {output}"
        )
    device = model.input.weight.device
    inputs: dict[str, Any] = {"x": bag.features[None].to(device)}
    if model.config.positions == "coordinates":
        if bag.coordinates is None:
            raise ValueError("this model has positions from coordinates, and the file has no coords: add them to it")
        inputs["coordinates"] = bag.coordinates[None].to(device)
    cls = model.config.cls_rows or 0
    if kind == "pooling":
        if model.pool is None:
            raise ValueError(
                f"a model with pooling={model.config.pooling!r} has no weights of rows: use --kind attention"
            )
        with torch.no_grad():
            weights = model.pool.weights(model.hidden(**inputs)[0]).mean(1).cpu()
    elif kind == "attention":
        rows: Rows = range(cls) if model.config.pooling == "cls" else "all"
        weights = attention_map(model, inputs, rows=rows).mean((0, 1, 2))[cls:]
    else:
        maps = gradient_map(model, inputs, of=lambda out: out[0].max() if output is None else out[0, output])
        weights = maps.sum((0, 1))[cls:].clamp_min(0.0)
    return weights / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def map_figure(weights: Tensor, bag: Bag, kind: str = "attention", width: float = 4.2) -> Figure:
    """A picture of the tiles above the mean weight: in a long sequence, most of the weight is spread evenly."""
    assert bag.coordinates is not None
    relative, unit = weights * len(weights), f"{kind}, relative to a mean tile"
    return plots.slide_figure(relative, bag.coordinates, int(TILE), unit=unit, least=1.0, width=width)


def write_map(folder: Path, name: str, weights: Tensor, bag: Bag, kind: str) -> list[Path]:
    """Write `NAME.png` and `NAME.geojson` into a folder, with `-KIND` after the name unless it is attention."""
    if bag.coordinates is None:
        raise ValueError(f"{name} has no coords: a map needs the place of each tile")
    file = name if kind == "attention" else f"{name}-{kind}"
    picture, places = folder / f"{file}.png", folder / f"{file}.geojson"
    figure = map_figure(weights, bag, kind, width=8)
    figure.suptitle(f"{name}: {len(weights):,} tiles", x=0.01, ha="left", fontsize=10)
    plots.save(picture, figure)
    write_whole(places, json.dumps(geojson(weights, bag, kind)))
    return [picture, places]


def geojson(weights: Tensor, bag: Bag, kind: str = "attention") -> dict[str, Any]:
    """Tiles as squares in the pixels of the slide's largest level, with their weight as the measurement `kind`.

    `relative` is the weight divided by that of an average tile.

    >>> found = geojson(torch.tensor([0.25, 0.75]), Bag(torch.zeros(2, 1), torch.tensor([[0, 0], [256, 0]]), 512.0))
    >>> found["features"][1]["geometry"]["coordinates"][0][0], found["features"][1]["properties"]["measurements"]
    ([512.0, 0.0], {'attention': 0.75, 'relative': 1.5})
    """
    assert bag.coordinates is not None
    side, features = bag.tile_pixels, []
    corners = (bag.coordinates.double() * (side / TILE)).tolist()
    for (x, y), weight in zip(corners, weights.double().tolist()):
        ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        measured = {kind: weight, "relative": weight * len(weights)}
        features.append(
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring]},
                "properties": {"objectType": "tile", "measurements": measured},
            }
        )
    return {"type": "FeatureCollection", "features": features}
