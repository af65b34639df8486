"""Megatron's model families: the model built from a Hugging Face config, and its weights there and back. Configs have passed
`fit.py`. Rotary frequencies are transformers' own, so that every static kind of scaling is the same there and here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedModel

from ...configs.backends import Megatron
from ..freed_memory import FreedMemory
from . import lora
from .layout import groups as among
from .mapping import BALANCE, global_name, hugging, is_adapter, is_expert, megatron, rule_of
from .model_config import transformer_config
from .spec import block_spec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MegatronPolicy(GPTModel):
    """Megatron's decoder; `labels` are the positions whose logits are computed."""

    def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """On the last stage float[K, V / T] at the K positions `labels`, before it hidden states."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # The output layer sums the gradient over its ranks itself, so it is only to be split here.
            self.output_layer.sequence_parallel = False
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states[given["labels"]], weight=weight)
        return logits.squeeze(1)


def build(
    source: PreTrainedModel,
    layout: Megatron,
    dtype: torch.dtype,
    device: torch.device,
    adapters: Mapping[str, torch.Tensor],
) -> list[MegatronPolicy]:
    """This rank's parts of the model, one for each virtual stage, with the weights still to be written; where there are `adapters`,
    by Hugging Face names, with a place for these, and the rest frozen."""
    config: Any = source.config
    own = transformer_config(config, layout, dtype)
    parts = []
    for stage in range(layout.virtual_stages):
        virtual = stage if layout.virtual_stages > 1 else None
        where = {"ignore_virtual": virtual is None, "vp_stage": virtual}
        part = MegatronPolicy(
            own,
            block_spec(own, virtual, adapted=bool(adapters)),  # pyright: ignore[reportArgumentType]
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=virtual,
        )
        for rotary in _rotary_embeddings(part):
            rotary.inv_freq = source.model.rotary_emb.inv_freq.clone()
        if adapters:
            lora.adapt(part, adapters, _naming(part, 0))
        _mark_split(part)
        parts.append(part.to(device))
    return parts


def _rotary_embeddings(part: MegatronPolicy) -> list[Any]:
    if not part.config.multi_latent_attention:
        return [part.rotary_pos_emb]
    layers: Any = part.decoder.layers
    return [layer.self_attention.rotary_pos_emb for layer in layers]


def _mark_split(part: MegatronPolicy) -> None:
    """Mark the parameters that are no copies of another tensor rank's, which initialization would: the norm of the gradient counts
    the others on the first rank only."""
    for name, parameter in names_of(part, 0).items():
        split = rule_of(name).split
        if split is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=split, stride=1)


def names_of(part: MegatronPolicy, expert_rank: int) -> dict[str, torch.Tensor]:
    """The parameters and stored buffers of `part` by global name, as they are called on `expert_rank`."""
    named = _naming(part, expert_rank)
    buffers = ((name, buffer) for name, buffer in part.named_buffers() if name.endswith(BALANCE))
    return {named(name): tensor for name, tensor in (*part.named_parameters(), *buffers)}


def _naming(part: MegatronPolicy, expert_rank: int) -> Callable[[str], str]:
    layers: Any = part.decoder.layers
    first_expert = experts_held(part.config) * expert_rank
    return functools.partial(global_name, first_layer=layers[0].layer_number - 1, first_expert=first_expert)


def experts_held(config: TransformerConfig) -> int:
    return (config.num_moe_experts or 0) // among().experts.size()


def shards_of(
    parts: Sequence[MegatronPolicy], weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter and stored buffer of this rank, and its shard of the full tensors that go by Hugging Face names."""
    groups, tied = parts[0].config.num_query_groups or 1, parts[0].share_embeddings_and_output_weights
    tensor, experts = among().tensor, among().experts
    for part in parts:
        for name, parameter in names_of(part, experts.rank()).items():
            rule = rule_of(name)
            # With tied weights the last of several stages holds the embedding once more.
            sources = [weights[EMBEDDING if tied and source == HEAD else source] for source in rule.sources]
            size, rank = (1, 0) if is_expert(name) else (tensor.size(), tensor.rank())
            yield parameter, megatron(rule, sources, groups, size, rank)


def full_weights(parts: Sequence[MegatronPolicy], *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective. On rank 0 Hugging Face name and full tensor, stage by stage, a tied tensor once, either of the `adapters` or of
    all else; nothing on the other ranks. Of the copies of the model only that of rank 0 takes part."""
    stages = among().stages
    named = ((name, parameter) for part in parts for name, parameter in names_of(part, 0).items())
    local = {name: parameter.detach() for name, parameter in named if is_adapter(name) == adapters}
    device = next(one.device for one in local.values())
    plan: list[Any] = [None] * stages.size()
    dist.all_gather_object(plan, [(name, one.shape, one.dtype) for name, one in local.items()], group=stages)
    # The ranks that have this rank's part of each stage; shards meet in the first.
    column = dist.get_process_group_ranks(stages)
    tied = parts[0].share_embeddings_and_output_weights
    with FreedMemory() as freed:
        for stage, name, shape, dtype in ((stage, *one) for stage, names in enumerate(plan) for one in names):
            if name == "output_layer.weight" and tied:
                continue
            if column[0] not in _shards_with_first(name):
                continue
            if stages.rank() == stage:
                shard = local[name]
                if stage:
                    dist.send(shard.contiguous(), column[0])
            elif stages.rank() == 0:
                shard = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(shard, column[stage])
            else:
                continue
            if stages.rank() == 0:
                yield from _assembled(name, shard, parts[0].config)
            freed.passed(shard.nbytes)


def _shards_with_first(name: str) -> Sequence[int]:
    """The ranks of the first stage that have shards of parameter `name` for rank 0: counted by tensor rank first, and experts by
    stage."""
    layout = among()
    if is_expert(name):
        return range(layout.experts.size())
    return range(1 if rule_of(name).split is None else layout.tensor.size())


def _assembled(name: str, shard: torch.Tensor, config: TransformerConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective over the ranks whose shards make it up. On rank 0 the tensors that the shards of parameter `name` make."""
    groups, width = config.num_query_groups or 1, config.kv_channels or 1
    group = among().experts if is_expert(name) else among().tensor
    whole, shards = shard, [shard]
    if group.size() > 1 and len(_shards_with_first(name)) > 1:
        first = dist.get_rank() == 0
        whole = shard.new_empty(group.size() * len(shard), *shard.shape[1:]) if first else shard
        shards = list(whole.split(len(shard)))
        dist.gather(shard.contiguous(), shards if first else None, group_dst=0, group=group)
    if dist.get_rank() > 0:
        return
    made = [(name, shards)]
    if is_expert(name):
        made = [(global_name(name, 0, experts_held(config) * rank), [one]) for rank, one in enumerate(shards)]
    for one, parts in made:
        rule = rule_of(one)
        if rule.split is None:
            yield rule.sources[0], shard.clone()  # the parameter itself
        elif (rule.split, rule.fusion) == (0, "none") and len(parts) > 1:
            yield rule.sources[0], whole
        else:
            yield from zip(rule.sources, hugging(rule, parts, groups, width), strict=True)
