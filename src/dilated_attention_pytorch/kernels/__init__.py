"""One operator, several engines. Private: use `dilated_attention_pytorch.functional`."""
