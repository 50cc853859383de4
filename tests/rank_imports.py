"""What ranks import, imported once in the process that they are forked from."""

import contextlib
import warnings

import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)

import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402

import dilated_attention_pytorch.cli  # noqa: E402
import dilated_attention_pytorch.parallel  # noqa: E402
import dilated_attention_pytorch.train  # noqa: E402, F401

with contextlib.suppress(ImportError):
    import hypothesis  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import tyro  # noqa: F401
