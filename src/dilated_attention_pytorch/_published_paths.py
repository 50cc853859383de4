"""Module paths and names that users type, and the room each one is in: the one table of them."""

from __future__ import annotations

import sys
from types import ModuleType

from dilated_attention_pytorch import core, nn, tools
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.models import longnet
from dilated_attention_pytorch.nn import kv_cache
from dilated_attention_pytorch.pages import plots
from dilated_attention_pytorch.parallel import names, schemes
from dilated_attention_pytorch.tools import show

PUBLISHED_PATHS: dict[str, ModuleType] = {
    "dilated_attention": nn,
    "improved_dilated_attention": nn,
    "multihead_dilated_attention": nn,
    "improved_multihead_dilated_attention": nn,
    "block_sparse_ring_dilated_attention": names,
    "block_sparse_ring_multihead_dilated_attention": names,
    "ring_dilated_attention": names,
    "ring_dilated_attention_v2": names,
    "ring_dilated_attention_v3": names,
    "ring_multihead_dilated_attention": names,
    "improved_distributed_dilated_attention": names,
    "ring_improved_distributed_dilated_attention": names,
    "nn.full_cache": kv_cache,
    "parallel.costs": schemes,
    "long_net": longnet,
    "inspect": tools,
    "inspect.pictures": plots,
    "inspect.show": show,
}

# Names that users import from a room below the one that defines them, which may not import it.
PUBLISHED_NAMES: dict[ModuleType, dict[str, object]] = {
    core: {
        "create_dilated_attention": nn.create_dilated_attention,
        "create_multihead_dilated_attention": nn.create_multihead_dilated_attention,
    }
}


def publish(package: ModuleType) -> None:
    """Make every path importable, as `os.path` is: an entry of `sys.modules` and an attribute of the package.

    The attribute `dilated_attention` is the function. It has the names of the module, because
    `import dilated_attention_pytorch.dilated_attention` reaches them through the attribute.
    """
    for name, room in PUBLISHED_PATHS.items():
        sys.modules[f"{package.__name__}.{name}"] = room
        if "." not in name and name not in vars(package):
            setattr(package, name, room)
    vars(dilated_attention).update({name: getattr(nn, name) for name in nn.__all__})
    for room, published in PUBLISHED_NAMES.items():
        vars(room).update(published)
