"""A patched model whose ranks have parts of each sequence, against one rank with whole sequences."""

from __future__ import annotations

import ranks
import torch
import torch.distributed as dist

import liger_hw
from liger_hw.transformers.tiny import tiny_model

BATCH, LENGTH, VOCAB = 2, 24, 64


class Gathered(torch.autograd.Function):
    """The shards [batch, heads, tokens, width] of all ranks; its gradient is summed over them."""

    @staticmethod
    def forward(ctx, shard):
        ctx.tokens = shard.shape[2]
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        return torch.cat(shards, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[:, :, dist.get_rank() * ctx.tokens :][:, :, : ctx.tokens]


def gathered_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention of this rank's queries over the keys of all ranks, as Ulysses and ring attention compute it."""
    key, value = (Gathered.apply(t.contiguous()) for t in (key, value))
    mine, world = query.shape[2], dist.get_world_size()
    at = torch.arange(mine, device=query.device) + dist.get_rank() * mine
    causal = at[:, None] >= torch.arange(mine * world, device=query.device)
    options = {"attn_mask": causal, "scale": scaling, "enable_gqa": True}
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def model(attention):
    from transformers import LlamaForCausalLM

    return tiny_model(LlamaForCausalLM, num_hidden_layers=2, vocab_size=VOCAB, attn_implementation=attention)


def check_sequence_shards(rank, device):
    from transformers import AttentionInterface

    AttentionInterface.register("gathered", gathered_attention)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.clone()
    labels[:, :3] = -100
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    items = int((shifted != -100).sum())
    alone = model("sdpa").to(device)
    whole = alone(tokens, labels=labels).loss
    whole.backward()
    world = dist.get_world_size()
    shard = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    positions = torch.arange(LENGTH, device=device)[None, shard].expand(BATCH, -1)
    ours = model("gathered").to(device)
    report = liger_hw.patch(ours)
    assert {"rms_norm", "swiglu", "fused_linear_cross_entropy"} <= {row.kernel for row in report.patched}
    outputs = ours(
        tokens[:, shard],
        position_ids=positions,
        labels=labels[:, shard],
        shift_labels=shifted[:, shard].contiguous(),
        num_items_in_batch=items,
    )
    assert outputs.logits.is_deferred, "the loss is not fused"
    outputs.loss.backward()
    loss = outputs.loss.detach().clone()
    dist.all_reduce(loss)  # each rank has its tokens' share of the mean over all of them
    torch.testing.assert_close(loss, whole.detach())
    for (name, parameter), of in zip(ours.named_parameters(), alone.parameters()):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, of.grad, rtol=1e-4, atol=1e-6, msg=name)


@ranks.everywhere
def test_ranks(kind):
    ranks.run(__file__, "check_sequence_shards", kind)
