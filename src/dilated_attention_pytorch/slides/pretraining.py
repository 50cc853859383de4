"""Masked-row prediction: an encoder learns to predict the embeddings of hidden rows from those around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.slides.batches import Batch

# Weights that belong to one task; the rest is what pretraining is for.
OF_ONE_TASK = ("head.", "mask", "predict.")


class MaskedEncoder(LongNetEncoder):
    """A `LongNetEncoder` with a learned row in place of hidden ones, and a layer that predicts their embeddings."""

    def _build(self) -> None:
        super()._build()
        c = self.config
        self.mask = nn.Parameter(torch.zeros(c.input_dim, **self._factory))
        self.predict = nn.Linear(c.d_model, c.input_dim, **self._factory)

    def loss(self, batch: Batch, share: float, block: int, generator: torch.Generator) -> Tensor:
        """The sum over sequences of the mean squared error of hidden rows, relative to the variance of the batch.

        Blocks of consecutive rows are hidden, because single rows can be predicted from their neighbours alone. Rows
        keep their relative sizes, so that a rare row that stands out counts more than the noise of the others. At least
        one row of each sequence is hidden.
        """
        x, rows = batch.features, batch.features.shape[1]
        drawn = (torch.rand(rows // block + 2, generator=generator) < share).repeat_interleave(block)
        first = int(torch.randint(block, (), generator=generator))
        is_hidden = drawn[first : first + rows].to(x.device)
        is_hidden[batch.cu_seqlens[:-1]] = True
        hidden = self.hidden(**{**batch.inputs, "x": torch.where(is_hidden[:, None], self.mask.to(x.dtype), x)})
        centred = x[0].float() - x[0].float().mean(0)
        wanted = centred / centred.square().mean().sqrt().clamp_min(1e-12)
        errors = (self.predict(hidden[0]).float() - wanted).square().mean(-1)  # (rows,)
        document = torch.bucketize(torch.arange(x.shape[1], device=x.device), batch.cu_seqlens[1:], right=True)
        sums = torch.zeros(2, len(batch.cu_seqlens) - 1, device=x.device)
        errors_of, count = sums.index_add(1, document, torch.stack((errors, torch.ones_like(errors))) * is_hidden)
        return (errors_of / count).sum()
