# %% [markdown]
# # LoRA on a Llama with dilated attention
# This example switches a dense Llama to dilated attention. Then it trains small adapters with PEFT; the weights stay
# fixed. It downloads nothing: it first trains a tiny Llama. To use your own model, load it with
# `AutoModelForCausalLM.from_pretrained` instead. Needs `pip install transformers peft`.

# %%
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch import branches_for
from dilated_attention_pytorch.models.hf import dilated_cache, use_dilated_attention

torch.manual_seed(0)
TOKENS = 256


def train(model: nn.Module, text: bytes, steps: int, lr: float) -> None:
    data = torch.tensor(list(text))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(1, steps + 1):
        rows = torch.stack([data[i : i + TOKENS] for i in torch.randint(len(data) - TOKENS, (4,))])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 15 == 0:
            print(f"  step {step:2}: loss {loss:.3f}")


# %%
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=TOKENS,
)  # fmt: skip
llama = LlamaForCausalLM(config)
print("dense attention, all weights:")
train(llama, b"the quick brown fox jumps over the lazy dog. " * 20, steps=75, lr=1e-2)

# %% [markdown]
# The last segment must be as long as the longest text. `heads` is the number of key/value heads: `branches_for` chooses
# rates whose grids these heads cover. For texts of many thousand tokens, leave out `shortest`.

# %%
segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=64, is_causal=True)
use_dilated_attention(llama, segment_lengths, dilation_rates)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
model = get_peft_model(llama, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=targets))
model.print_trainable_parameters()
print(f"dilated attention, segments {segment_lengths}, rates {dilation_rates}, adapters alone, another text:")
train(model, b"the lazy dog jumps over the quick brown fox. " * 20, steps=120, lr=1e-2)

# %% [markdown]
# Merge the adapters into the weights, and generate with a cache that does not grow with the text.

# %%
merged = model.merge_and_unload().eval()
prompt = torch.tensor([list(b"the lazy dog jumps over the quick brown fox. the lazy ")])
cache = dilated_cache(merged, batch=1)
said = merged.generate(prompt, max_new_tokens=36, do_sample=False, past_key_values=cache, pad_token_id=0)
print("generated:", bytes(said[0, prompt.shape[1] :].tolist()).decode(errors="replace"))
