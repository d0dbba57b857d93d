"""Times speculators' own training step on this CPU: forward with eager attention under bf16 autocast, backward, clipping, optimizer.
(Flex attention has no backward on CPUs, and is no faster here.) Prints one JSON line; see bench.py."""
import argparse
import json
import os
import resource
import statistics
import time
from types import SimpleNamespace

os.environ.update(TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.optimizers import build_optimizers
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

parser = argparse.ArgumentParser()
for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "block", "taps", "rank", "tokens", "anchors", "steps", "threads"):
    parser.add_argument("--" + name, type=int, required=True)
parser.add_argument("--optimizer", choices=("adamw", "muon"), required=True)
a = parser.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)

layers = Qwen3Config(hidden_size=a.hidden, num_hidden_layers=a.layers, num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, head_dim=a.head_dim,
                     intermediate_size=a.ffn, vocab_size=a.vocab, rms_norm_eps=1e-6, max_position_embeddings=40960, layer_types=["full_attention"] * a.layers)
layers._attn_implementation = "eager"
model = DSparkDraftModel(DSparkSpeculatorConfig(
    transformer_layer_config=layers, draft_vocab_size=a.vocab, block_size=a.block, aux_hidden_state_layer_ids=list(range(1, a.taps + 1)),
    mask_token_id=a.vocab - 1, markov_rank=a.rank,
    speculators_config=SpeculatorsConfig(algorithm="dspark", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=a.block)],
                                         default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]))))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(0.02 * torch.randn_like(parameter) if parameter.ndim > 1 else torch.ones_like(parameter))
model.train()
optimizers = build_optimizers(model, SimpleNamespace(optimizer=a.optimizer, lr=1e-4, weight_decay=0.01, muon_lr=1e-3, muon_momentum=0.95, muon_weight_decay=0.1,
                                                     muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw"))
row = (torch.randn(1, a.tokens, a.taps * a.hidden, dtype=torch.bfloat16), torch.randint(0, a.vocab - 1, (1, a.tokens)), torch.ones(1, a.tokens),
       torch.randn(1, a.tokens, a.hidden, dtype=torch.bfloat16), torch.zeros(1, a.tokens, dtype=torch.long), torch.arange(a.tokens)[None])
options = {"loss_config": resolve_loss_config("kl_div", "eager"), "tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0], "max_anchors": a.anchors}
seconds = []
for _ in range(a.steps + 1):  # the first one warms up
    began = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, loss, _ = model(*row, **options)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    seconds.append(time.perf_counter() - began)
step = statistics.median(seconds[1:])
print(json.dumps({"seconds": step, "slots_per_s": a.anchors * a.block / step, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
