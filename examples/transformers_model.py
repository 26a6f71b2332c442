"""A model of Hugging Face's transformers on attention(), beside the same model on torch's SDPA.

One with trained weights is loaded likewise: AutoModelForCausalLM.from_pretrained(name,
attn_implementation="attention_worklog").
"""

import torch
from attention_worklog.transformers import register
from transformers import AutoModelForCausalLM, LlamaConfig

if torch.cuda.is_available():
    device, dtype, hidden, layers, heads, tokens = "cuda", torch.bfloat16, 2048, 8, 16, 4096
else:
    device, dtype, hidden, layers, heads, tokens = "cpu", torch.float32, 256, 2, 4, 32

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1024,
    hidden_size=hidden,
    intermediate_size=3 * hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=heads // 4,
    max_position_embeddings=2 * tokens,
)

register()
model = AutoModelForCausalLM.from_config(config, attn_implementation="attention_worklog")
model.to(device, dtype)

prompt = torch.randint(1, config.vocab_size, (2, tokens), device=device)  # 0 would be padding
generated = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
print("generated:", generated[:, tokens:].tolist())

with torch.no_grad():
    logits = model(generated).logits.float()
    model.set_attn_implementation("sdpa")
    expected = model(generated).logits.float()
difference = (logits - expected).norm() / expected.norm()
rounding = torch.finfo(dtype).eps
print(
    f"logits differ from SDPA's by {difference:.1e} of their norm; {dtype} rounds by {rounding:.1e}"
)
