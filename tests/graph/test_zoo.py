"""A zoo of architectures with planted dead and constant units: they go, outputs stay, and what loads is a module."""

import copy
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip import codec
from bayeszip.errors import ModelError
from bayeszip.graph import dense_state, load_into, to_module
from bayeszip.graph.onnx import to_onnx
from bayeszip.tensors import CompressedModel

Network = TypeVar("Network", bound=nn.Module)
#: What a module's attribute is to a type checker that doesn't know which module it is.
Attribute = Tensor | nn.Module | None


@dataclass
class Case:
    """A network, its inputs, and the shapes that some of its tensors must have once the planted units are gone."""

    net: nn.Module
    inputs: tuple[Tensor, ...]
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    name: str = ""


def zero(tensor: Attribute, *index: int | list[int] | slice) -> None:
    """Plant zeros."""
    fill(tensor, 0.0, *index)


def fill(tensor: Attribute, value: float, *index: int | list[int] | slice) -> None:
    assert isinstance(tensor, Tensor)
    with torch.no_grad():
        tensor[index] = value


def trained_like(net: Network) -> Network:
    """Statistics and scales of norms as training leaves them, a third of the weights pruned."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim > 1 and "pos" not in name:
                parameter[torch.rand_like(parameter) < 0.15] = 0
    return net.eval()


# ── plain and normalized ──────────────────────────────────────────────────────────────────────────────────────────────


def plain_cnn() -> Case:
    net = trained_like(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.1), nn.AvgPool2d(2), nn.Conv2d(8, 12, 3), nn.GELU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.Hardswish(), nn.Linear(16, 5),
        )
    )  # fmt: skip
    zero(net[3].weight, slice(None), [0, 1])  # unread channels
    zero(net[0].weight, 2)  # a constant channel: no padding behind it, so it folds
    fill(net[0].bias, 0.7, 2)
    zero(net[3].weight, [4, 5])  # constants through GELU, pool and flatten into the linear layer
    zero(net[9].weight, slice(None), [0, 1, 2])
    return Case(
        net, (torch.randn(2, 3, 12, 12),), {"3.weight": (10, 5, 3, 3), "7.weight": (13, 40), "9.weight": (5, 13)}
    )


def vgg_bn() -> Case:
    net = trained_like(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Dropout(), nn.Linear(10, 4),
        )
    )  # fmt: skip
    zero(net[1].weight, [0, 1, 2])  # the norm makes constants: negative, zero, positive
    fill(net[1].bias, -0.5, 0)
    fill(net[1].bias, 0.0, 1)
    fill(net[1].bias, 0.5, 2)  # this one stays: zero padding follows
    zero(net[3].weight, [3])  # a constant by its running mean
    fill(net[4].running_mean, 2.0, 3)
    fill(net[4].bias, -0.1, 3)
    zero(net[7].weight, slice(None), [4])  # unread
    zero(net[8].weight, [5, 6])  # constants that fold into the last layer, pooled and flattened
    fill(net[8].bias, 0.3, [5, 6])
    return Case(
        net,
        (torch.randn(2, 3, 8, 8),),
        {"0.weight": (6, 3, 3, 3), "3.weight": (6, 6, 3, 3), "7.weight": (8, 6, 3, 3), "8.running_var": (8,),
         "13.weight": (4, 8)},
    )  # fmt: skip


# ── residual ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Basic(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, before: int, inner: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(before, after, 1, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet_basic() -> Case:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    one, two = Basic(8, 8), Basic(8, 12, 2)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))
    net = trained_like(nn.Sequential(OrderedDict(stem=stem, one=one, two=two, head=head)))
    zero(one.conv2.weight, slice(None), [0, 1])  # two inner channels, unread
    zero(two.bn1.weight, [3])  # an inner channel, constant and negative
    fill(two.bn1.bias, -1.0, 3)
    assert isinstance(two.shortcut, nn.Sequential)
    for reader in (one.conv1, two.conv1, two.shortcut[0]):  # a channel of the stream that nobody reads
        zero(reader.weight, slice(None), [5])
    zero(head[2].weight, slice(None), [7, 8])  # two of the second stream
    return Case(
        net,
        (torch.randn(2, 3, 8, 8),),
        {"stem.0.weight": (7, 3, 3, 3), "one.conv1.weight": (6, 7, 3, 3), "one.conv2.weight": (7, 6, 3, 3),
         "one.bn2.running_mean": (7,), "two.conv1.weight": (11, 7, 3, 3), "two.conv2.weight": (10, 11, 3, 3),
         "two.shortcut.0.weight": (10, 7, 1, 1), "head.2.weight": (5, 10)},
    )  # fmt: skip


def resnet_bottleneck() -> Case:
    one, two = Bottleneck(3, 4, 12), Bottleneck(12, 6, 12)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))
    net = trained_like(nn.Sequential(OrderedDict(one=one, two=two, head=head)))
    zero(two.body[3].weight, [2])  # a constant in the middle of the block, negative before its ReLU
    fill(two.body[4].running_mean, 1.0, 2)
    fill(two.body[4].bias, 0.0, 2)
    # A unit of the stream that is written by the first block and zero after both: nothing of it arrives.
    for weight in (one.body[7].weight, one.body[7].bias, two.body[7].weight, two.body[7].bias):
        zero(weight, [4])
    zero(one.shortcut.weight, [4])
    return Case(
        net,
        (torch.randn(2, 3, 6, 6),),
        {"two.body.3.weight": (5, 6, 3, 3), "two.body.0.weight": (6, 11, 1, 1), "head.2.weight": (3, 11),
         "one.shortcut.weight": (11, 3, 1, 1)},
    )  # fmt: skip


class Inverted(nn.Module):
    def __init__(self, channels: int, inner: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True), nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.residual = stride == 1 and channels == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet() -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(), Inverted(6, 18, 6), Inverted(6, 12, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    trained_like(net)
    inverted = net[3]
    assert isinstance(inverted, Inverted)
    zero(inverted.body[6].weight, slice(None), [0, 1])  # unread
    zero(inverted.body[3].weight, [2])  # the depthwise filter is zero, the norm makes it negative
    fill(inverted.body[4].running_mean, 1.0, 2)
    fill(inverted.body[4].bias, 0.0, 2)
    zero(inverted.body[0].weight, [3])  # zero from the start, and its norm negative, but padding keeps it zero
    fill(inverted.body[1].bias, -2.0, 3)
    fill(inverted.body[1].running_mean, 0.0, 3)
    fill(inverted.body[4].bias, -2.0, 3)
    fill(inverted.body[4].running_mean, 0.0, 3)
    zero(net[7].weight, slice(None), [1])
    return Case(
        net,
        (torch.randn(2, 3, 16, 16),),
        {"3.body.0.weight": (14, 6, 1, 1), "3.body.3.weight": (14, 1, 3, 3), "3.body.6.weight": (6, 14, 1, 1),
         "4.body.6.weight": (7, 12, 1, 1), "7.weight": (4, 7)},
    )  # fmt: skip


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.one = nn.Conv2d(6, 4, 3, padding=1)
        self.two = nn.Conv2d(10, 4, 3, padding=1)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = torch.cat([x, F.relu(self.one(x))], 1)
        x = torch.cat([x, F.relu(self.two(x))], 1)
        return self.head(x.mean((2, 3)))


def densenet() -> Case:
    net = trained_like(Dense())
    for layer, columns in ((net.one, [2]), (net.two, [2, 7]), (net.head, [2, 7, 12])):
        zero(layer.weight, slice(None), columns)
    zero(net.one.weight, [0])
    fill(net.one.bias, -1.0, 0)
    return Case(
        net,
        (torch.randn(2, 3, 6, 6),),
        {"stem.weight": (5, 3, 3, 3), "one.weight": (2, 5, 3, 3), "two.weight": (3, 7, 3, 3), "head.weight": (3, 10)},
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.middle = nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.merge = nn.Conv2d(12, 6, 3, padding=1, padding_mode="reflect")
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = F.relu(self.norm(self.middle(F.max_pool2d(skip, 2))))
        x = torch.cat([F.relu(self.up(x)), skip], 1)
        x = F.interpolate(F.relu(self.merge(x)), scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(x)


def unet() -> Case:
    net = trained_like(UNet())
    zero(net.up.weight, [0, 1])  # unread channels of the middle
    zero(net.norm.weight, [2])
    fill(net.norm.bias, -0.5, 2)
    zero(net.up.weight, slice(None), [3])  # a constant out of the transposed convolution: reflection keeps it
    fill(net.up.bias, 0.25, 3)
    zero(net.merge.weight, slice(None), [6 + 5])  # unread in the merge, but read on the way down: it stays
    zero(net.merge.weight, slice(None), [6 + 4])
    zero(net.middle.weight, slice(None), [4])  # and this one nowhere
    zero(net.out.weight, slice(None), [0])
    return Case(
        net,
        (torch.randn(2, 3, 8, 8),),
        {"down.weight": (5, 3, 3, 3), "middle.weight": (5, 5, 3, 3), "up.weight": (5, 5, 2, 2),
         "merge.weight": (5, 10, 3, 3), "out.weight": (2, 5, 1, 1)},
    )  # fmt: skip


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(x))
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(scale))))
        return self.head((x * scale).mean([2, 3]))


def squeeze_excite() -> Case:
    net = trained_like(SqueezeExcite())
    zero(net.head.weight, slice(None), [0, 1])  # unread by the head; the first also by the squeeze
    zero(net.squeeze.weight, slice(None), [0])
    zero(net.conv.weight, [2])  # zero whatever it is scaled by
    zero(net.conv.bias, [2])
    zero(net.squeeze.weight, [3])
    fill(net.squeeze.bias, -1.0, 3)
    return Case(
        net,
        (torch.randn(2, 3, 6, 6),),
        {"conv.weight": (6, 3, 3, 3), "squeeze.weight": (3, 6, 1, 1), "excite.weight": (6, 3, 1, 1),
         "head.weight": (3, 6)},
    )  # fmt: skip


class GroupNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)
        self.norm = nn.GroupNorm(4, 12)
        self.grouped = nn.Conv2d(12, 8, 3, padding=1, groups=4)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.norm(self.conv(x)))
        return self.head(F.mish(self.instance(self.grouped(x))).amax((2, 3)))


def group_norm() -> Case:
    net = trained_like(GroupNormed())
    zero(net.head.weight, slice(None), [2, 3])  # all that the second group writes
    zero(net.head.weight, slice(None), [4])  # half of the third: it stays
    return Case(
        net,
        (torch.randn(2, 3, 7, 7),),
        {"conv.weight": (9, 3, 3, 3), "norm.weight": (9,), "grouped.weight": (6, 3, 3, 3), "head.weight": (3, 6)},
    )


# ── sequences ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


def transformer() -> Case:
    net = trained_like(Encoder())
    first = net.layers.layers[0]
    zero(first.linear2.weight, slice(None), [0, 1, 2])
    zero(first.linear1.weight, [3])
    zero(first.linear1.bias, [3])  # GELU(0) is 0
    zero(first.self_attn.out_proj.weight, slice(None), slice(4, 8))  # nobody reads the second head
    attention = net.layers.layers[1].self_attn
    zero(attention.in_proj_weight, slice(32 + 8, 32 + 12))  # the values of the third head are zero
    zero(attention.in_proj_bias, slice(32 + 8, 32 + 12))
    return Case(
        net,
        (torch.randn(2, 6, 5),),
        {"layers.layers.0.linear1.weight": (20, 16), "layers.layers.0.linear2.weight": (16, 20),
         "layers.layers.0.self_attn.in_proj_weight": (36, 16), "layers.layers.0.self_attn.out_proj.weight": (16, 12),
         "layers.layers.1.self_attn.in_proj_bias": (36,), "layers.layers.1.self_attn.out_proj.weight": (16, 12)},
    )  # fmt: skip


class Block(nn.Module):
    mask: Tensor

    def __init__(self, width: int, heads: int, *, packed: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.packed = packed
        self.fc, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attend(self.norm1(x)))
        return x + self.out(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))

    def attend(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        if self.packed:
            qkv = self.qkv(x).reshape(batch, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value = qkv.unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            parts = self.qkv(x).split(width, dim=2)
            query, key, value = (part.view(batch, steps, self.heads, -1).transpose(1, 2) for part in parts)
            scores = (query @ key.transpose(-2, -1)) / (query.size(-1) ** 0.5)
            if self.causal:
                scores = scores.masked_fill(self.mask[:, :, :steps, :steps] == 0, float("-inf"))
            mixed = F.softmax(scores, dim=-1) @ value
        return mixed.transpose(1, 2).reshape(batch, steps, -1)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.positions = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList([Block(16, 4, packed=False, causal=True), Block(16, 4, packed=True, causal=True)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plant_in_block(block: nn.Module) -> None:
    assert isinstance(block, Block)
    zero(block.out.weight, slice(None), [0, 1, 2])
    zero(block.fc.weight, [3, 4])
    zero(block.fc.bias, [3])
    fill(block.fc.bias, 0.5, 4)
    zero(block.proj.weight, slice(None), slice(4, 8))


def gpt() -> Case:
    net = trained_like(GPT())
    for block in net.blocks:
        plant_in_block(block)
    return Case(
        net,
        (torch.randint(0, 20, (2, 7)),),
        {"tokens.weight": (20, 16), "blocks.0.fc.weight": (27, 16), "blocks.0.qkv.weight": (36, 16),
         "blocks.0.proj.weight": (16, 12), "blocks.1.out.weight": (16, 27), "blocks.1.qkv.weight": (36, 16),
         "blocks.1.proj.weight": (16, 12)},
    )  # fmt: skip


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, 16) * 0.2)
        self.pos = nn.Parameter(torch.randn(1, 5, 16) * 0.2)
        self.blocks = nn.Sequential(*(Block(16, 4, packed=True, causal=False) for _ in range(2)))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit() -> Case:
    net = trained_like(ViT())
    for block in net.blocks:
        plant_in_block(block)
    return Case(
        net,
        (torch.randn(2, 3, 8, 8),),
        {"blocks.0.fc.weight": (27, 16), "blocks.1.qkv.weight": (36, 16), "blocks.1.proj.weight": (16, 12)},
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], *, bidirectional: bool, use_hidden: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.rnn = kind(8, 10, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.use_hidden = use_hidden
        self.head = nn.Linear(20 if bidirectional else 10, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output, state = self.rnn(self.embed(tokens))
        state = state[1][-1] if isinstance(state, tuple) else state[-1]
        return self.head(output[:, -1]) if not self.use_hidden else self.head(state)


def plant_recurrent(net: Recurrent, gates: int, suffix: str = "") -> None:
    zero(net.embed.weight, slice(None), [0])  # a feature that is always zero
    units = 10
    for layer in (0, 1):
        recurrent = getattr(net.rnn, f"weight_hh_l{layer}{suffix}")
        others = [row for row in range(gates * units) if row % units not in (1, 2)]
        zero(recurrent, others, 1)  # units 1 and 2 are read by themselves alone
        zero(recurrent, others, 2)
        for tensor in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):  # unit 3 never leaves zero
            zero(getattr(net.rnn, f"{tensor}_l{layer}{suffix}"), (2 if gates > 1 else 0) * units + 3)
    zero(net.rnn.weight_ih_l1, slice(None), [1, 2])
    zero(net.head.weight, slice(None), [1, 2])


def lstm() -> Case:
    net = trained_like(Recurrent(nn.LSTM, bidirectional=False, use_hidden=True))
    plant_recurrent(net, 4)
    return Case(
        net,
        (torch.randint(0, 12, (2, 5)),),
        {"embed.weight": (12, 7), "rnn.weight_ih_l0": (28, 7), "rnn.weight_hh_l0": (28, 7),
         "rnn.weight_ih_l1": (28, 7), "rnn.bias_hh_l1": (28,), "head.weight": (3, 7)},
    )  # fmt: skip


def gru() -> Case:
    net = trained_like(Recurrent(nn.GRU, bidirectional=False, use_hidden=True))
    plant_recurrent(net, 3)
    return Case(
        net,
        (torch.randint(0, 12, (2, 5)),),
        {"embed.weight": (12, 7), "rnn.weight_ih_l0": (21, 7), "rnn.weight_hh_l1": (21, 7), "head.weight": (3, 7)},
    )


def bidirectional_lstm() -> Case:
    net = trained_like(Recurrent(nn.LSTM, bidirectional=True, use_hidden=False))
    zero(net.embed.weight, slice(None), [0, 4])
    for layer in (0, 1):
        for tensor in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            zero(getattr(net.rnn, f"{tensor}_l{layer}_reverse"), 23)
    return Case(
        net,
        (torch.randint(0, 12, (2, 5)),),
        {"embed.weight": (12, 6), "rnn.weight_hh_l0": (40, 10), "rnn.weight_hh_l0_reverse": (36, 9),
         "rnn.weight_ih_l1": (40, 19), "head.weight": (3, 19)},
    )  # fmt: skip


class Translator(nn.Module):
    """A decoder that begins from what its encoder has read."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(5, 8, batch_first=True)
        self.decoder = nn.LSTM(5, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, read: Tensor, said: Tensor) -> Tensor:
        _, state = self.encoder(read)
        return self.head(self.decoder(said, state)[0])


def translator() -> Case:
    net, units = trained_like(Translator()), 8
    for rnn in (net.encoder, net.decoder):
        others = [row for row in range(4 * units) if row % units not in (1, 2)]
        zero(rnn.weight_hh_l0, others, 1)  # units 1 and 2 are read by themselves alone
        zero(rnn.weight_hh_l0, others, 2)
        for tensor in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):  # unit 3 never leaves zero
            zero(getattr(rnn, f"{tensor}_l0"), 2 * units + 3)
    # Unit 4 brings nothing new into the decoder, but begins there from what the encoder has of it.
    for tensor in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        zero(getattr(net.decoder, f"{tensor}_l0"), 2 * units + 4)
    zero(net.head.weight, slice(None), [1, 2])
    return Case(
        net,
        (torch.randn(2, 6, 5), torch.randn(2, 4, 5)),
        {"encoder.weight_hh_l0": (20, 5), "decoder.weight_hh_l0": (20, 5), "decoder.weight_ih_l0": (20, 5),
         "head.weight": (3, 5)},
    )  # fmt: skip


# ── several inputs and outputs, one layer used twice ──────────────────────────────────────────────────────────────────


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 6, 3)
        self.numbers = nn.Linear(4, 6)
        self.shared = nn.Linear(6, 6)
        self.one = nn.Linear(12, 2)
        self.two = nn.Linear(6, 3, bias=False)

    def forward(self, image: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.relu(self.shared(torch.relu(self.image(image)).mean((2, 3))))
        second = torch.relu(self.shared(torch.relu(self.numbers(numbers))))
        return self.one(torch.cat([first, second], 1)), torch.tanh(self.two(first * second))


def siamese() -> Case:
    net = trained_like(Siamese())
    zero(net.shared.weight, slice(None), [0])  # unread on both ways
    zero(net.image.weight, [1])  # zero on one way only: it stays
    zero(net.image.bias, [1])
    zero(net.one.weight, slice(None), [2, 8])  # unread where the two meet, but the product reads it: it stays
    zero(net.one.weight, slice(None), [3, 9])
    zero(net.two.weight, slice(None), [3])  # and this one nowhere
    return Case(
        net,
        (torch.randn(2, 1, 5, 5), torch.randn(2, 4)),
        {"image.weight": (5, 1, 3, 3), "numbers.weight": (5, 4), "shared.weight": (5, 5), "one.weight": (2, 10),
         "two.weight": (3, 5)},
    )  # fmt: skip


ZOO: dict[str, Callable[[], Case]] = {
    build.__name__: build
    for build in (
        plain_cnn, vgg_bn, resnet_basic, resnet_bottleneck, mobilenet, densenet, unet, squeeze_excite, group_norm,
        transformer, gpt, vit, lstm, gru, bidirectional_lstm, translator, siamese,
    )
}  # fmt: skip


def built(name: str) -> Case:
    torch.manual_seed(7)
    return replace(ZOO[name](), name=name)


@pytest.fixture(params=ZOO)
def case(request) -> Case:
    return built(request.param)


@pytest.fixture(scope="module")
def quantized(compress) -> Callable[[Case], CompressedModel]:
    """The quantized model of a case as it was built; each is traced once for all tests."""
    known: dict[str, CompressedModel] = {}

    def model(case: Case) -> CompressedModel:
        if case.name not in known:
            known[case.name] = compress(case.net, *case.inputs)
        return known[case.name]

    return model


def test_planted_units_are_gone_and_outputs_stay(case, compress, shrink):
    model = compress(case.net, *case.inputs, raw=lambda name: case.net.get_parameter(name).ndim < 2)
    shrunk = shrink(model, *case.inputs, fold="always")
    assert {name: shrunk.tensors[name].shape for name in case.expected} == case.expected
    for batch in (1, 3):
        inputs = [each[:1].expand(batch, *each.shape[1:]) for each in case.inputs]
        for output in _listed(to_module(shrunk)(*inputs)):
            assert output.shape[0] == batch


def test_without_folding_not_a_bit_more_than_rounding(case, quantized, shrink):
    model = quantized(case)
    shrink(model, *case.inputs, fold="never", rounding=1e-12)


def test_the_module_fine_tunes_and_copies(case, quantized, shrink):
    shrunk = shrink(quantized(case), *case.inputs)
    module = to_module(shrunk).train()
    own = {name for name in shrunk.tensors if not name.startswith("constant_")}
    assert {name for name in module.state_dict() if not name.startswith("constant_")} == own
    target = [torch.randn_like(each) for each in _listed(module(*case.inputs))]
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = sum(F.mse_loss(one, other) for one, other in zip(_listed(module(*case.inputs)), target, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    module.eval()
    copied = copy.deepcopy(module)
    for one, other in zip(_listed(module(*case.inputs)), _listed(copied(*case.inputs)), strict=True):
        assert torch.equal(one, other)


def test_stored_indices_bring_back_the_original_shapes(case, quantized, shrink):
    model = quantized(case)
    shrunk = shrink(model, *case.inputs, indices=True, fold="always")
    again = codec.decode(codec.encode(shrunk))
    state = {name: torch.from_numpy(value) for name, value in dense_state(again).items()}
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: model.tensors[name].shape for name in state
    }
    case.net.load_state_dict(state, strict=False)
    for one, other in zip(_listed(case.net(*case.inputs)), _listed(to_module(model)(*case.inputs)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    with pytest.raises(ModelError, match=r"without storing .*--set coding\.keep_indices=true"):
        dense_state(shrink(model, *case.inputs))


def test_loading_into_the_class(case, quantized, shrink):
    shrunk = shrink(quantized(case), *case.inputs)
    # Heads of fixed width, or layers of different sizes, the class can't follow: there zeros are put back.
    net = load_into(shrunk, case.net).eval()
    for one, other in zip(_listed(net(*case.inputs)), _listed(to_module(shrunk)(*case.inputs)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def _listed(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_the_onnx_file_computes_the_same(case, quantized, shrink):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    shrunk = shrink(quantized(case), *case.inputs)
    session = runtime.InferenceSession(to_onnx(shrunk))
    names = [each.name for each in session.get_inputs()]
    for batch in (1, 5):
        inputs = [each[:1].expand(batch, *each.shape[1:]).contiguous() for each in case.inputs]
        found = session.run(None, {name: each.numpy() for name, each in zip(names, inputs, strict=True)})
        for one, other in zip(_listed(to_module(shrunk)(*inputs)), found, strict=True):
            expected = one.detach().numpy()
            assert np.abs(expected - other).max() <= 1e-5 * max(1.0, np.abs(expected).max())


LOADER = """
import sys
import numpy as np
from bayeszip import codec
from bayeszip.graph import to_module
import torch
for folder in sys.argv[1:]:
    with open(f"{folder}/net.bayz", "rb") as file:
        net = to_module(codec.decode(file.read()))
    inputs = [torch.from_numpy(each) for each in np.load(f"{folder}/inputs.npz").values()]
    result = net(*inputs)
    results = [result] if isinstance(result, torch.Tensor) else result
    np.savez(f"{folder}/outputs.npz", *(each.detach().numpy() for each in results))
"""


def test_all_load_in_a_fresh_process_without_their_classes(quantized, shrink, tmp_path):
    for name in ZOO:
        case = built(name)
        shrunk = shrink(quantized(case), *case.inputs)
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.bayz").write_bytes(codec.encode(shrunk))
        np.savez(tmp_path / name / "inputs.npz", *(each.numpy() for each in case.inputs))
        expected = [each.detach().numpy() for each in _listed(to_module(shrunk)(*case.inputs))]
        np.savez(tmp_path / name / "expected.npz", *expected)
    folders = [str(tmp_path / name) for name in ZOO]
    subprocess.run([sys.executable, "-c", LOADER, *folders], check=True, cwd=tmp_path)
    for name in ZOO:
        outputs, expected = (np.load(tmp_path / name / f"{which}.npz") for which in ("outputs", "expected"))
        assert outputs.files == expected.files
        for each in outputs.files:
            np.testing.assert_allclose(outputs[each], expected[each], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet_basic", "transformer", "siamese"])
def test_the_module_compiles(name, quantized, shrink):
    case = built(name)
    module = to_module(shrink(quantized(case), *case.inputs))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for one, other in zip(_listed(compiled(*case.inputs)), _listed(module(*case.inputs)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
