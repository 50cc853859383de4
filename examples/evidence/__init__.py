"""`./run evidence`: one small language model with dense, dilated and sliding-window attention, on the same text."""
