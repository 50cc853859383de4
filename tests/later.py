"""What later models do instead of MAGNETO, all together: options of `ModelConfig`."""

LATER = {
    "norm": "rms", "activation": "swiglu", "qk_norm": True, "tie_weights": False, "logit_soft_cap": 2.0,
    "stagger": True,
}  # fmt: skip
