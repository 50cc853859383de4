"""Masked-row prediction: an encoder learns to predict the embeddings of hidden rows from those around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

    def loss(self, batch: Batch, share: float, generator: torch.Generator) -> Tensor:
        """The sum over sequences of the mean squared error of hidden rows, each row normalised to unit variance.

        At least one row of each sequence is hidden.
        """
        x = batch.features
        is_hidden = torch.rand(x.shape[1], generator=generator).to(x.device) < share
        is_hidden[batch.cu_seqlens[:-1]] = True
        hidden = self.hidden(**{**batch.inputs, "x": torch.where(is_hidden[:, None], self.mask.to(x.dtype), x)})
        wanted = F.layer_norm(x.float(), x.shape[-1:])[0]
        errors = (self.predict(hidden[0]).float() - wanted).square().mean(-1)  # (rows,)
        document = torch.bucketize(torch.arange(x.shape[1], device=x.device), batch.cu_seqlens[1:], right=True)
        sums = torch.zeros(2, len(batch.cu_seqlens) - 1, device=x.device)
        errors_of, count = sums.index_add(1, document, torch.stack((errors, torch.ones_like(errors))) * is_hidden)
        return (errors_of / count).sum()
