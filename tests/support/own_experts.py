"""Blocks of routed experts in loops, as the code of models on the hub spells them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from own_models import WIDTH, SmallConfig, SmallModel
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

INNER, EXPERTS, TOP_K, HEADS = 64, 6, 2, 2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    """Biases, another activation, and a scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.act = tf.activations.ACT2FN["gelu_new"]
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(hidden_states))) * self.scale


class Block(nn.Module):
    kind: type[nn.Module] = Gated

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(self.kind() for _ in range(EXPERTS))


class WhereEach(Block):
    """Finds the tokens of each expert in a mask; scores are normalized in place."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        logits = self.gate(hidden_states)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, selected = torch.topk(weights, TOP_K, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device
        )
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            expert = self.experts[number]
            idx, top_x = torch.where(mask[number])
            if top_x.shape[0] == 0:
                continue
            current = hidden_states[None, top_x].reshape(-1, width)
            current = expert(current) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch, length, width), logits


class WhereHit(Block):
    """Only goes through the experts that were hit; has a gated shared expert."""

    kind = Plain

    def __init__(self) -> None:
        super().__init__()
        self.shared_expert, self.shared_gate = Gated(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        x = hidden_states.view(-1, shape[-1])
        weights = self.gate(x).sigmoid()
        weights, selected = weights.topk(TOP_K, dim=-1)
        final = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        for number in hit:
            idx, top_x = torch.where(mask[number].squeeze(0))
            out = self.experts[number](x[top_x])
            final.index_add_(0, top_x, (out * weights[top_x, idx, None]).to(x.dtype))
        final += F.sigmoid(self.shared_gate(x)) * self.shared_expert(x)
        return final.view(shape)


class GroupGate(nn.Module):
    """Sigmoid scores; experts are chosen in the best groups, by scores with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.e_score_correction_bias = nn.Parameter(torch.empty(EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        bsz, seq_len, h = hidden_states.shape
        hidden_states = hidden_states.view(-1, h)
        logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32), None)
        scores = logits.sigmoid()
        choice = scores.view(bsz * seq_len, -1) + self.e_score_correction_bias.unsqueeze(0)
        group_scores = choice.view(bsz * seq_len, 3, -1).topk(2, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=2, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(bsz * seq_len, 3, EXPERTS // 3)
            .reshape(bsz * seq_len, -1)
        )
        choice = choice.masked_fill(~score_mask.bool(), float("-inf"))
        _, topk_idx = torch.topk(choice, k=TOP_K, dim=-1, sorted=False)
        topk_weight = scores.gather(1, topk_idx)
        topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20) * 2.5
        return topk_idx, topk_weight


class SortedCounts(Block):
    """Sorts the rows by expert, and reads how many each has; has shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = GroupGate()
        self.shared_experts = Gated()

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity = hidden_states
        shape = hidden_states.shape
        topk_idx, topk_weight = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        y = self.moe_infer(hidden_states, topk_idx, topk_weight).view(*shape)
        return y + self.shared_experts(identity)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert.cpu().numpy()):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            expert = self.experts[i]
            tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
            outputs.append(expert(tokens_for_this_expert))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )


class SortedEnds(Block):
    """The same with cumulative counts, results weighted in place, and a sum by scattering."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        scores = self.gate(hidden_states.view(-1, shape[-1])).softmax(dim=-1)
        topk_weight, topk_idx = torch.topk(scores, k=TOP_K, dim=-1, sorted=False)
        hidden_states = hidden_states.view(-1, shape[-1])
        flat = topk_idx.view(-1)
        return self.moe_infer(hidden_states, flat, topk_weight.view(-1, 1)).view(*shape)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, flat_indices: Tensor, flat_weights: Tensor) -> Tensor:
        expert_cache = torch.zeros_like(x)
        idxs = flat_indices.argsort()
        tokens_per_expert = flat_indices.bincount().cpu().numpy().cumsum(0)
        token_idxs = idxs // TOP_K
        for i, end_idx in enumerate(tokens_per_expert):
            start_idx = 0 if i == 0 else tokens_per_expert[i - 1]
            if start_idx == end_idx:
                continue
            expert = self.experts[i]
            exp_token_idx = token_idxs[start_idx:end_idx]
            expert_out = expert(x[exp_token_idx])
            expert_out.mul_(flat_weights[idxs[start_idx:end_idx]])
            expert_cache.scatter_reduce_(
                0, exp_token_idx.view(-1, 1).repeat(1, x.shape[-1]), expert_out, reduce="sum"
            )
        return expert_cache


class MaskedRows(Block):
    """Adds to the rows of a mask."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        weights, selected = self.gate(flat).topk(TOP_K)
        weights = weights.softmax(-1, dtype=torch.float).type_as(x)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = selected == i
            if mask.any():
                rows, k = mask.nonzero(as_tuple=True)
                out[rows] += weights[rows, k, None] * expert(flat[rows])
        return out.view_as(x)


class RepeatedRows(Block):
    """Repeats each row for its experts, and selects with masks."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights, selected = torch.topk(self.gate(x).softmax(-1), TOP_K)
        flat = selected.view(-1)
        x = x.repeat_interleave(TOP_K, dim=0)
        y = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(x[flat == i])
        y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return y.view(*shape)


class DenseWeights(Block):
    """One expert for each token; weights are in a row of all experts."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, shape[-1])
        scores = self.gate(x).softmax(-1)
        top, selected = scores.topk(TOP_K, dim=-1)
        routing = torch.zeros_like(scores).scatter(1, selected, top)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token = (routing[:, i] > 0).nonzero().squeeze(-1)
            if token.numel():
                out = out.index_add(0, token, expert(x[token]) * routing[token, i].unsqueeze(-1))
        return out.view(shape)


class Weighted(Gated):
    """Weighs its own results."""

    def forward(self, hidden_states: Tensor, routing_weights: Tensor) -> Tensor:
        return routing_weights * super().forward(hidden_states)


class WeightedInside(Block):
    """Experts get the weights; rows are selected by lists of numbers."""

    kind = Weighted

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = hidden_states.shape
        x = hidden_states.view(-1, width)
        logits = self.gate(x)
        weights, selected = torch.topk(F.softmax(logits, dim=1), TOP_K, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        final = torch.zeros((batch * length, width), dtype=x.dtype, device=x.device)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[number])
            if top_x.shape[0] == 0:
                continue
            tokens, places = top_x.tolist(), idx.tolist()
            current = x[None, tokens].reshape(-1, width)
            current = expert(current, weights[tokens, places, None])
            final.index_add_(0, top_x, current.to(x.dtype))
        final = final.reshape(batch, length, width)
        return final, (logits.view(batch, length, -1), selected.view(batch, length, -1))


class WidenedLinear(nn.Module):
    def __init__(self, depth: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, channels, depth))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return F.linear(x.float(), self.weight[number].float())


class WidenedSlices(nn.Module):
    """Linears get an expert's number, and compute in float32; there is no branch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up_proj, self.gate_proj = (WidenedLinear(WIDTH, INNER) for _ in range(2))
        self.down_proj = WidenedLinear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        logits = torch.matmul(flat.to(torch.float32), self.gate.weight.t().to(torch.float32))
        weights, selected = torch.topk(logits.sigmoid(), TOP_K, dim=1)
        out = torch.zeros(flat.shape, dtype=x.dtype, device=x.device)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for i in range(EXPERTS):
            k, token = torch.where(mask[i])
            current = flat[None, token].reshape(-1, x.shape[-1])
            gate = F.silu(self.gate_proj(current, i)).clamp(max=7)
            up = self.up_proj(current, i).clamp(min=-7, max=7)
            own = self.down_proj(gate * up, i) * weights[token, k, None]
            out.index_add_(0, token, own.to(x.dtype))
        return out.view_as(x)


class Losses(Block):
    """Sets attributes that the model reads."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(flat).softmax(-1).topk(TOP_K)
        self.loss, self.scores = 0.0, weights
        self.balance = weights.mean(0).sum()
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, k = torch.where(selected == i)
            if rows.numel():
                out[rows] += weights[rows, k, None] * expert(flat[rows])
        return out.view_as(x)


class AddedLoss(Losses):
    """The loss that the layer adds to its states depends on the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.loss = self.balance
        return out


class Inner(nn.Module):
    """Experts in a module that gets the routing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, weights: Tensor, selected: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in selected.unique().tolist():
            token, k = torch.where(selected == number)
            out[token] += self.blocks[number](x[token]) * weights[token, k].unsqueeze(1)
        return out


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.ffn = nn.Linear(WIDTH, EXPERTS), Inner()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, selected = torch.topk(F.softmax(self.router(flat), -1), 1)
        return self.ffn(flat, weights, selected).reshape(x.shape)


class Slices(nn.Module):
    """Experts are slices of parameters; they have biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.b1 = nn.Parameter(torch.empty(EXPERTS, INNER))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.b2 = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i in range(EXPERTS):
            rows, k = torch.where(selected == i)
            if rows.numel() == 0:
                continue
            inner = F.gelu(F.linear(flat[rows], self.w1[i], self.b1[i]))
            own = F.linear(inner, self.w2[i]) + self.b2[i]
            out.index_add_(0, rows, own * weights[rows, k, None])
        return out.view_as(x)


class SlicedLinear(nn.Module):
    def __init__(self, depth: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, depth, channels))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return x @ self.weight[number]


class SlicedModules(nn.Module):
    """Linears get an expert's number; the loop is in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = SlicedLinear(WIDTH, INNER), SlicedLinear(WIDTH, INNER)
        self.down_proj = SlicedLinear(INNER, WIDTH)
        self.act_fn = nn.SiLU()

    def output_of(self, x: Tensor, number: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x, number)).clamp(max=7)
        return self.down_proj(gate * self.up_proj(x, number), number)

    def forward(self, x: Tensor, weights: Tensor, selected: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for hit in mask.sum(dim=(-1, -2)).nonzero():
            number = hit[0]
            k, token = torch.where(mask[number])
            own = self.output_of(x[token], number) * weights[token, k, None]
            out.index_add_(0, token, own)
        return out


class NestedSlices(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = SlicedModules()


class Dropping(Block):
    """An expert only takes its first three tokens."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, k = torch.where(selected == i)
            if not len(rows):
                continue
            rows, k = rows[:3], k[:3]
            out[rows] += weights[rows, k, None] * expert(flat[rows])
        return out.view_as(x)


class WidenedSum(Block):
    """Adds up in float32, the dtype of its weights, to which results in 16 bits are widened."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        scores = F.linear(flat.float(), self.gate.weight.float()).sigmoid()
        weights, chosen = scores.topk(TOP_K, dim=-1)
        out = torch.zeros_like(flat, dtype=weights.dtype)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 0, 1)
        for number, expert in enumerate(self.experts):
            rows, k = torch.where(mask[number])
            if rows.numel() > 0:
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, k].unsqueeze(-1))
        return out.type(x.dtype).view_as(x)


BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (
        WhereEach,
        WhereHit,
        SortedCounts,
        SortedEnds,
        MaskedRows,
        RepeatedRows,
        DenseWeights,
        WeightedInside,
        Nested,
        Slices,
        NestedSlices,
        WidenedSlices,
        Losses,
        WidenedSum,
    )
}


class RoutedByOthers(Block):
    """Chooses by other states than its experts get."""

    def forward(self, router_input: Tensor, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(router_input.view(flat.shape)).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, k = torch.where(selected == i)
            if rows.shape[0] == 0:
                continue
            out[rows] += weights[rows, k, None] * expert(flat[rows])
        return out.view_as(x)


class Listed(nn.Module):
    """Experts are parameters in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        weights = [torch.empty(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.weights = nn.ParameterList(map(nn.Parameter, weights))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i, weight in enumerate(self.weights):
            rows, k = torch.where(selected == i)
            if rows.numel():
                out[rows] += weights[rows, k, None] * F.linear(flat[rows], weight).relu()
        return out.view_as(x)


class LoopInLayer(nn.Module):
    """A decoder layer with its experts and the loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.moe = nn.ModuleList(Gated() for _ in range(EXPERTS))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        heads = self.norm(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.router(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.moe):
            rows, k = torch.where(selected == i)
            if rows.shape[0] == 0:
                continue
            out[rows] += weights[rows, k, None] * expert(flat[rows])
        return x + out.view_as(x)


REFUSED: dict[str, type[nn.Module]] = {
    block.__name__: block for block in (Dropping, AddedLoss, RoutedByOthers, Listed)
}


class OwnExpertsConfig(SmallConfig):
    model_type = "llmc-test-own-experts"
    block: str = "WhereEach"
    num_attention_heads: int = HEADS


class OwnExpertsLayer(nn.Module):
    def __init__(self, block: str) -> None:
        super().__init__()
        self.norm, self.post_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = {**BLOCKS, **REFUSED}[block]()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        before = x
        split = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).transpose(1, 3)
        q, k, v = (split[:, :, i] for i in range(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        given = self.post_norm(x)
        others = (before,) if isinstance(self.mlp, RoutedByOthers) else ()
        moe: Any = self.mlp(*others, given)
        x = x + getattr(self.mlp, "loss", 0.0)
        return x + (moe[0] if isinstance(moe, tuple) else moe)


class OwnExpertsModel(SmallModel, tf.GenerationMixin):
    config_class = OwnExpertsConfig

    def __init__(self, config: OwnExpertsConfig) -> None:
        count = config.num_hidden_layers
        has_loop = config.block == LoopInLayer.__name__
        layers = (
            LoopInLayer() if has_loop else OwnExpertsLayer(config.block) for _ in range(count)
        )
        super().__init__(config, layers)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        """Adds up a term of the loss, which the logits don't depend on."""
        out = super().forward(input_ids, position_ids)
        assert out.logits is not None
        terms = [block.balance for block in self.modules() if isinstance(block, Losses)]
        return CausalLMOutput(logits=out.logits, loss=sum(terms, out.logits.new_zeros(1).squeeze()))


def register() -> None:
    tf.AutoConfig.register(OwnExpertsConfig.model_type, OwnExpertsConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(OwnExpertsConfig, OwnExpertsModel, exist_ok=True)


def filled(block: str) -> OwnExpertsModel:
    """A model with random weights."""
    model = OwnExpertsModel(OwnExpertsConfig(block=block)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model
