"""`parallelize`: a model on one mesh of named axes, which shard its tokens, heads and parameters.

If ranks hold shards of the tokens, not only attention changes: lengths, positions and the memory that a decoder attends
to must be those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import check_instance, check_whole
from dilated_attention_pytorch.core.modes import first_derivatives_only
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.nn.positions import DocumentSpans, RotaryPositions, Rotation
from dilated_attention_pytorch.nn.replacement import replace_parts
from dilated_attention_pytorch.nn.transformer import DilatedTransformerDecoderLayer, DilatedTransformerEncoderLayer
from dilated_attention_pytorch.parallel.attention import described_lengths, spans_of_all
from dilated_attention_pytorch.parallel.group import Place, RankGroup, check_mesh, ranks_of
from dilated_attention_pytorch.parallel.module import AcrossRanks
from dilated_attention_pytorch.parallel.names import RingAdvancedDistributedDilatedAttention
from dilated_attention_pytorch.parallel.schemes import MEMORY_BUDGET, Scheme, check_scheme
from dilated_attention_pytorch.parallel.sharding import Shards, even_lengths
from dilated_attention_pytorch.parallel.tensor_parallel import indivisible, share_features

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("data", "sequence", "tensor")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    scheme: Scheme = "auto",
    memory_budget: int = MEMORY_BUDGET,
    shard_parameters: bool = True,
    **fsdp: Any,
) -> nn.Module:
    """Distribute a model that is built from the modules of this library over a mesh, in place, and return it.

    Args:
        model: the same on every rank, with the same weights.
        mesh: its axes are any of `data` (ranks have different sequences), `sequence` (ranks have contiguous shards of
            the same sequences, in order) and `tensor` (ranks have the same tokens, and share heads and feed-forward
            features).
        scheme, memory_budget: how rows of a shared segment travel; see `sharded_dilated_attention`.
        shard_parameters: FSDP2 shards parameters over `data` and `sequence`, and averages gradients over them. False
            leaves that to the caller, for DDP over `token_mesh(mesh)`, or for DeepSpeed.
        fsdp: keywords of `fully_shard`, such as `mp_policy` or `offload_policy`.

    Gradients are averages over the ranks of `data` and `sequence`, so the loss of a rank must be the sum over its own
    tokens, divided by the mean number of tokens per rank. Ranks along `tensor` must draw the same random numbers.

    A `LongNetEncoder`, and a model after `patch_gigapath`, pool rows: along `sequence`, every rank passes the whole
    sequences and gets their whole outputs, and the loss of each rank is that of the whole. The ranks share the rows
    within the layers.
    """
    check_mesh(mesh)
    found, error = {}, None
    everyone = _everyone(mesh)
    try:
        _check(model, mesh, scheme, memory_budget)
        found = _described(model)
    except Exception as wrong:
        error = wrong
    settings = {"scheme": scheme, "memory_budget": memory_budget, "shard_parameters": shard_parameters, **fsdp}
    everyone.agree({"axes": mesh.mesh_dim_names, "mesh": mesh.mesh.tolist(), **settings, **found}, 0, error)
    names = mesh.mesh_dim_names or ()
    sequence, heads = (Place(mesh=mesh, axis=axis) if axis in names else None for axis in ("sequence", "tensor"))
    if heads is not None and heads.ranks().size > 1:
        share_features(model, mesh["tensor"])
    places: dict[str, Any] = {"sequence": sequence, "heads": heads}
    model = replace_parts(model, lambda part: _across_ranks(part, places, scheme, memory_budget))
    if sequence is not None and sequence.ranks().size > 1:
        _share_lengths(model, sequence)
    tokens = token_mesh(mesh)
    if shard_parameters and tokens is not None and any(True for _ in model.parameters()):
        from torch.distributed.fsdp import fully_shard

        for unit in _units(model):  # each is gathered when it runs
            fully_shard(unit, mesh=tokens, **fsdp)
        fully_shard(model, mesh=tokens, **fsdp)
    return model


def token_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axes `data` and `sequence`, whose ranks have different tokens, as one axis; None if the mesh has neither."""
    names = tuple(name for name in check_mesh(mesh).mesh_dim_names or () if name in ("data", "sequence"))
    if len(names) < 2:
        return mesh[names[0]] if names else None
    return mesh[names]._flatten("_".join(names))


def _everyone(mesh: DeviceMesh) -> RankGroup:
    """All ranks of a mesh, whatever its axes."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not on the mesh {mesh}: call this only on ranks of the mesh")
    if mesh.size() == dist.get_world_size():
        return ranks_of()
    if mesh.ndim == 1:
        return ranks_of(mesh.get_group())
    return ranks_of(dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True))


def _check(model: nn.Module, mesh: DeviceMesh, scheme: str, memory_budget: int) -> None:
    """Everything that may be wrong, before anything is changed."""
    check_instance("model", model, nn.Module)
    names = mesh.mesh_dim_names
    if not names or set(names) - set(AXES):
        raise ValueError(
            f"the axes of the mesh must be of {', '.join(AXES)}, got {names or f'{mesh.ndim} axes without names'}: "
            "make it with init_device_mesh(..., mesh_dim_names=(...))"
        )
    check_scheme(scheme)
    check_whole("memory_budget", memory_budget, least=0)
    sizes = {axis: mesh[axis].size() if axis in names else 1 for axis in AXES}
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ValueError("the model's parameters are on a mesh already: parallelize it once, before any other engine")
    for part in model.modules():
        if isinstance(part, RingAdvancedDistributedDilatedAttention):
            part.options.check_axes(mesh)
    attentions = {name: part for name, part in model.named_modules() if isinstance(part, DilatedAttention)}
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no dilated attention: parallelize takes models that have some")
    for name, part in attentions.items():
        if isinstance(part, AcrossRanks):
            stated = part.sequence and part.sequence.size
            if stated not in (None, sizes["sequence"]):
                raise ValueError(
                    f"ring_size of {name or 'the model'} must be the size of the axis 'sequence', got {stated} and "
                    f"{sizes['sequence']}: leave ring_size out"
                )
            if part.token_layout != "contiguous":  # positions and documents of a whole model would need it too
                raise ValueError(
                    f"{name or 'the model'} has token_layout={part.token_layout!r}, and a model's sequences are cut "
                    "into contiguous shards: leave token_layout out"
                )
        elif type(part) not in (DilatedAttention, ImprovedDilatedAttention):
            raise ValueError(
                f"{name or 'the model'} is a {type(part).__name__}, which is not built to attend across ranks: use "
                "DilatedAttention, or one of the Ring classes"
            )
    if sizes["tensor"] > 1 and (problem := indivisible(model, sizes["tensor"])) is not None:
        raise ValueError(problem)


def _described(model: nn.Module) -> dict[str, object]:
    """What must be the same on every rank: all parameters, with sums that differ if seeds do."""
    return {
        f"parameter {name}": (tuple(x.shape), x.dtype, None if x.is_meta else x.detach().double().sum().item())
        for name, x in model.named_parameters()
    }


def _across_ranks(part: nn.Module, places: dict[str, Any], scheme: Scheme, memory_budget: int) -> nn.Module:
    """The module that replaces `part` where ranks share tokens and heads."""
    sequence = places["sequence"]
    if isinstance(part, AcrossRanks):  # a ring keeps its own scheme
        part.sequence, part.heads = sequence, places["heads"]
    elif isinstance(part, DilatedAttention) and any(places.values()):
        return AcrossRanks.of(part, **places, scheme=scheme, memory_budget=memory_budget)
    elif sequence is not None and isinstance(part, RotaryPositions):
        return PositionsAcrossRanks(part, sequence)
    elif sequence is not None and isinstance(part, DocumentSpans):
        return SpansAcrossRanks(sequence)
    return part


def _share_lengths(model: nn.Module, sequence: Place) -> None:
    """Let the layers of a model use the shard lengths that it agrees on when its forward pass begins, until it ends."""
    memory = WholeMemory(sequence)

    def forget(*_: object) -> None:
        sequence.ranks().lengths = None
        memory.forget()

    model.register_forward_hook(forget, always_call=True)
    for part in model.modules():
        if isinstance(part, DilatedTransformerDecoderLayer):
            part.cross_attn.register_forward_pre_hook(memory, with_kwargs=True)


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """The layers and attentions below a model, outermost only."""
    for child in model.children():
        if isinstance(child, (DilatedTransformerEncoderLayer, MultiheadDilatedAttention)):
            yield child
        else:
            yield from _units(child)


class SpansAcrossRanks(DocumentSpans):
    """The spans of the whole sequence: `key_padding_mask` is of the rank's own tokens, other lengths of all tokens.

    A model asks for its spans before anything else, so this agrees on the shard lengths for all of its layers. Equal
    lengths on one rank can go with different lengths on others, so each forward pass asks the other ranks once.
    """

    def __init__(self, sequence: Place) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, batch: int, tokens: int, *, cache: object = None, **lengths: Any) -> Tensor | None:
        given = {name: x for name, x in lengths.items() if x is not None}
        ranks = self.sequence.ranks()
        own: list[int] = []
        described: dict[str, object] = {}
        error = None
        try:
            own, described = described_lengths(batch, tokens, given)
        except Exception as wrong:
            error = wrong
        call = {"lengths": sorted(given), "batch": batch, **described}
        agreed = ranks.agree(call, tokens, error, own=own)
        ranks.lengths = agreed.lengths
        spans = spans_of_all(batch, Shards(agreed.lengths), given, agreed.own)
        return None if spans is None else spans.to(next(iter(given.values())).device)

    def own(self, rows: Tensor) -> Tensor:
        ranks = self.sequence.ranks()
        first, last = Shards(even_lengths(rows.shape[1], ranks.size)).bounds(ranks.rank)
        ranks.lengths = ranks.agree({"whole sequences": tuple(rows.shape[:2])}, last - first).lengths
        return rows[:, first:last]

    def whole(self, rows: Tensor) -> Tensor:
        ranks = self.sequence.ranks()
        assert ranks.lengths is not None  # since `own`
        return _Gather.apply(rows, ranks, ranks.lengths)


class PositionsAcrossRanks(nn.Module):
    """The rotation of a rank's own tokens, by their positions in the whole sequence."""

    def __init__(self, positions: RotaryPositions, sequence: Place) -> None:
        super().__init__()
        self.of_whole, self.sequence = positions, sequence

    def forward(
        self, batch: int, tokens: int, spans: Tensor | None = None, device: torch.device | str | None = None
    ) -> Rotation:
        ranks = self.sequence.ranks()
        call: dict[str, object] = {"batch": batch, "spans": None if spans is None else spans.tolist()}
        shards = Shards(ranks.agree(call, tokens, lengths=ranks.lengths_of_model(tokens)).lengths)
        return self.of_whole(batch, tokens, spans, device, first=shards.bounds(ranks.rank)[0])

    def of(self, positions: Tensor) -> Rotation:
        """The rotation of positions `(1 or B, N)`, for a cache; the attention then says that it takes none."""
        return self.of_whole.of(positions)


class WholeMemory:
    """A hook of `nn.MultiheadAttention(batch_first=True)` that gathers keys, values and their mask from all ranks.

    A dense `attn_mask` has the rank's own rows and all keys. All layers of a decoder share one hook, because they have
    one memory, whose shard lengths only the first layer asks for.
    """

    def __init__(self, sequence: Place) -> None:
        self._sequence = sequence
        self._known: tuple[Tensor, tuple[int, ...]] | None = None

    def forget(self) -> None:
        self._known = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        ranks = self._sequence.ranks()
        query, key, value = args
        mask = kwargs["key_padding_mask"]
        call = {"batch": key.shape[0], "memory mask": mask is not None, "one memory": key is value}
        lengths = self._known[1] if self._known is not None and self._known[0] is key else None
        lengths = ranks.agree(call, key.shape[1], lengths=lengths).lengths
        self._known = key, lengths
        whole = _Gather.apply(key, ranks, lengths)
        kwargs = {**kwargs, "key_padding_mask": None if mask is None else _Gather.apply(mask, ranks, lengths)}
        return (query, whole, whole if value is key else _Gather.apply(value, ranks, lengths)), kwargs


class _Gather(torch.autograd.Function):
    """`(B, all tokens, ...)` from each rank's tokens; the gradient of a rank's tokens is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup, lengths: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.shards = ranks, Shards(lengths)
        even = x.new_zeros((x.shape[0], max(lengths), *x.shape[2:]))  # messages of one size
        even[:, : x.shape[1]] = x
        shards = [torch.empty_like(even) for _ in lengths]
        with ranks.agreement.blocked():
            dist.all_gather(shards, even, group=ranks.group)
        return torch.cat([shard[:, :length] for shard, length in zip(shards, lengths)], 1)

    @staticmethod
    @first_derivatives_only("attention across ranks")
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        with ctx.ranks.agreement.blocked():
            dist.all_reduce(total, group=ctx.ranks.group)
        first, last = ctx.shards.bounds(ctx.ranks.rank)
        return total[:, first:last], None, None
