"""The command `transformers`, which then knows LongNet and `attn_implementation="dilated"`.

`python -m dilated_attention_pytorch.models.hf serve FOLDER` serves the folder of `./run export`.
"""

from __future__ import annotations

import transformers
from transformers.cli.transformers import app

from dilated_attention_pytorch.models import hf


def main() -> None:
    hf.register()
    transformers.LongNetForCausalLM = hf.LongNetForCausalLM  # where `serve` looks for a model's class
    app()


if __name__ == "__main__":
    main()
