"""Architectures as people have them: packed, they load without their class and compute what their weights say."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import bayeszip
from bayeszip.graph.proof import alike, outputs_of


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 4, 4), ConvNeXtBlock(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(12),
        nn.Linear(12, 10),
    )  # fmt: skip


class MBConv(nn.Module):
    """EfficientNet's block: expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True))
        self.depthwise = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.depthwise(self.expand(x))), inplace=True)
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.project(y * gate)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16, padding_idx=0), nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(torch.tanh(self.encoder(x, src_key_padding_mask=present == 0)[:, 0]))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        square = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(square + 1e-6)).type_as(x)


class LlamaBlock(nn.Module):
    """Rotary positions, fewer heads of keys and values than of queries, a gated feed-forward part."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = RMSNorm(16), RMSNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, width, bias=False) for width in (16, 8, 8, 16))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((16, 24), (16, 24), (24, 16)))
        angles = torch.outer(torch.arange(12.0), 10000 ** (-torch.arange(0, 4, 2) / 4)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, 4).transpose(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[2]] + torch.cat((-second, first), -1) * self.sin[: x.shape[2]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = self.rotated(self.heads(self.q(y))), self.rotated(self.heads(self.k(y))), self.heads(self.v(y))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def wav2vec() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 8, 10, 5, bias=False), nn.GroupNorm(8, 8), nn.GELU(), nn.Conv1d(8, 8, 3, 2), nn.GELU(),
        weight_norm(nn.Conv1d(8, 8, 4, padding=2, groups=4), dim=2), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    )  # fmt: skip


class PointNet(nn.Module):
    """A transformation of the points, found from their maximum; one network for all."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16)
        )
        self.turn, self.head = nn.Linear(16, 9), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn(torch.max(self.points(x), 2)[0]).view(-1, 3, 3) + torch.eye(3)
        turned = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        return F.log_softmax(self.head(self.points(turned).max(2).values), 1)


class GroupNormBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.GroupNorm(4, after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(4, after)
        self.shortcut = nn.Conv2d(before, after, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, (hidden, _) = self.lstm(self.table(x))
        return self.head(torch.cat((hidden[-2], hidden[-1]), 1)), self.head(output)


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, 2, 1), nn.PReLU(16), nn.PixelShuffle(2),
        nn.ReLU(), nn.Conv2d(4, 12, 3, 1, 1), nn.PixelShuffle(2), nn.Sigmoid(),
    )  # fmt: skip


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        x, y = self.tower(one), self.tower(other)
        return F.pairwise_distance(x, y), F.cosine_similarity(x, y), F.normalize(x)


class Windows(nn.Module):
    """Swin's attention in shifted windows, with a table of relative positions."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.table = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(0.1 * torch.randn(9, 2))
        self.register_buffer("places", torch.arange(16 * 16) % 9)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, depth = x.shape
        x = torch.roll(x, (-2, -2), (1, 2)).view(batch, height // 4, 4, width // 4, 4, depth)
        q, k, v = (
            self.qkv(x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, depth)).view(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        )
        bias = self.table[self.places].view(16, 16, 2).permute(2, 0, 1)
        y = ((q * 0.5) @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(-1, 16, depth)).view(batch, height // 4, width // 4, 4, 4, depth)
        return torch.roll(y.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, depth), (2, 2), (1, 2))


class Logits(nn.Module):
    """What a causal language model of the transformers package returns first."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        settings = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))


def integers(high: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, high, (batch, *shape), generator=torch.Generator().manual_seed(batch))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[[int], Tensor], ...]]] = {
    "ConvNeXt": (convnext, (numbers(3, 16, 16),)),
    "EfficientNet": (lambda: nn.Sequential(MBConv(6), nn.Flatten(), nn.Linear(6 * 36, 4)), (numbers(6, 6, 6),)),
    "BERT": (Bert, (integers(50, 10), integers(2, 10))),
    "GPT-2": (Logits, (integers(50, 8),)),
    "Llama": (lambda: nn.Sequential(nn.Embedding(50, 16), LlamaBlock(), RMSNorm(16)), (integers(50, 9),)),
    "wav2vec": (wav2vec, (numbers(1, 200),)),
    "PointNet": (PointNet, (numbers(3, 20),)),
    "ResNet with GroupNorm": (lambda: nn.Sequential(GroupNormBlock(3, 8), nn.Flatten()), (numbers(3, 8, 8),)),
    "LSTM, two layers, both ways": (Tagger, (integers(20, 7),)),
    "autoencoder": (autoencoder, (numbers(3, 8, 8),)),
    "Siamese": (Siamese, (numbers(1, 8, 8), numbers(1, 8, 8))),
    "Swin": (Windows, (numbers(8, 8, 8),)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_it_loads_without_its_class_and_computes_the_same(name, tmp_path):
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    net = make().eval()
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    if name == "BERT":  # of the first token there is always something to see
        inputs = (inputs[0], lambda batch: NETWORKS["BERT"][1][1](batch).index_fill(1, torch.tensor(0), 1))
    result = bayeszip.pack(net, example_inputs=tuple(each(2) for each in inputs), components=16)
    assert result.without_graph is None
    result.save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz")
    # The same weights without a graph, in the network's own class.
    own = bayeszip.pack(net, components=16).network().eval()
    for batch in (1, 5):
        x = tuple(each(batch) for each in inputs)
        with torch.no_grad():
            assert alike(outputs_of(own(*x)), outputs_of(loaded(*x)), 1e-5)


def test_a_network_that_returns_tensors_by_name_gives_them_in_order():
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x * 2, "hidden": x}

    result = bayeszip.pack(Named(), example_inputs=torch.ones(2, 3))
    assert result.without_graph is None
    logits, hidden = result.model(torch.ones(2, 3))
    assert torch.equal(logits, 2 * hidden)
