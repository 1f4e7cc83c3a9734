"""Kinds that differ by their layers: recurrent ones, attention, bilinear ones, layers of other people's making."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import Kind, add

__all__ = ["BERT", "BILINEAR", "CONV1D", "ENCODER", "GPT", "GRU", "LENGTH", "LSTM", "OWN", "TOKENS", "majority"]

TOKENS, LENGTH = 12, 10


def _tokens(seed: int, count: int, length: int = LENGTH) -> Tensor:
    return torch.randint(TOKENS, (count, length), generator=torch.Generator().manual_seed(seed))


def majority(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of tokens; the class is of which kind most of them are."""
    tokens = _tokens(seed, count)
    tokens = torch.where(torch.arange(LENGTH) < 5, (torch.arange(count) % 3)[:, None] + 3 * (tokens // 3), tokens)
    return tokens, torch.arange(count) % 3


def _counting(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences that go up by one or two, as the first step says; what follows each token is to be said."""
    start = _tokens(seed, count, 1)
    step = 1 + torch.arange(count)[:, None] % 2
    sequence = (start + step * torch.arange(LENGTH + 1)) % TOKENS
    # Nothing says yet which step it is when the first token is seen.
    targets = sequence[:, 1:].clone()
    targets[:, 0] = -100
    return sequence[:, :-1], targets


def _agreement(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two vectors; the class is whether their first features agree."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(count, 12, generator=generator) for _ in range(2))
    return (left, right), ((left[:, :2] * right[:, :2]).sum(1) > 0).long()


class Recurrent(nn.Module):
    """Reads a sequence, and says what the last state says."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], units: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 16)
        self.rnn = kind(16, units, batch_first=True)
        self.head = nn.Linear(units, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


class Encoder(nn.Module):
    """Torch's own encoder, with its fast path for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)).mean(1))


class Block(nn.Module):
    """Causal attention, then two linear layers."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPTNet(nn.Module):
    """A table of positions of its own, and an output layer tied to the embedding without being a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 16)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, 16))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens) + self.positions[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embed.weight)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Pairing(nn.Module):
    """What a bilinear layer thinks of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(12, 12, 8), nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.relu(self.pair(left, right)))


class Transposed(nn.Module):
    """Layers of Hugging Face's making, as GPT-2 has them."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.embed = nn.Embedding(TOKENS, 16)
        self.up, self.down, self.head = Conv1D(48, 16), Conv1D(16, 48), nn.Linear(16, 3)
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head((x + self.down(F.gelu(self.up(x)))).mean(1))


class Same(nn.Linear):
    """Another name for the same."""


class Standardized(nn.Linear):
    """A forward of its own, that reads the weight in its own way."""

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, rows, self.bias)


def _own() -> nn.Module:
    return nn.Sequential(Same(12, 40), nn.ReLU(), Standardized(40, 24), nn.ReLU(), nn.Linear(24, 3))


def _features(count: int, seed: int) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 3
    inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    inputs[:, :3] += 4 * F.one_hot(labels, 3)
    return inputs, labels


class Sentences(nn.Module):
    """A tiny BERT as Hugging Face's Trainer wants it, that says its scores where nobody asks for a loss."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert, self.head = BertModel(config, add_pooling_layer=False), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        scores = self.head(self.bert(input_ids).last_hidden_state.mean(1))
        return scores if labels is None else {"loss": F.cross_entropy(scores, labels), "logits": scores}


LSTM = add(Kind("LSTM classifier", lambda: Recurrent(nn.LSTM), majority, (3, 17), examples=1024, epochs=20, size=128))
GRU = add(Kind("GRU classifier", lambda: Recurrent(nn.GRU), majority, (3, 17), examples=1024, epochs=20, size=128))
ENCODER = add(Kind("nn.TransformerEncoder", Encoder, majority, (3, 17), examples=1024, epochs=20, size=128))
GPT = add(Kind("small GPT", GPTNet, _counting, (3, 6), token_loss, examples=1024, epochs=20, size=128))
BERT = add(Kind("tiny BERT", Sentences, majority, (3, 6), examples=1024, epochs=30))
BILINEAR = add(Kind("Bilinear", Pairing, _agreement, (7, 12), examples=2048, epochs=40, size=128))
CONV1D = add(Kind("Hugging Face Conv1D", Transposed, majority, (3, 17), examples=1024, epochs=20, size=128))
OWN = add(Kind("own linear layers", _own, _features, (7, 12), examples=1024, epochs=10))
