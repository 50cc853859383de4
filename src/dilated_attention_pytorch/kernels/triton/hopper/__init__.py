"""Kernels for Hopper's own instructions, in Gluon: tensor copies by a producer, matrix products by warpgroups."""
