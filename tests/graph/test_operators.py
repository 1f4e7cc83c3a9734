"""Every operator: what is traced computes what the module computed, at any batch size, and states its shapes."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip.graph import UnknownOperator, UntraceableModel, from_state, to_module, trace
from bayeszip.graph.families import RULES
from bayeszip.graph.liveness import drop_dead_units
from bayeszip.graph.proof import prove_same
from bayeszip.graph.soundness import shapes
from bayeszip.operators import OPERATOR_OF_OPCODE, OPERATORS
from bayeszip.tensors import CompressedModel


class Function(nn.Module):
    """A function as a module, behind a linear layer or a convolution that keeps the shape."""

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x if self.layer is None else self.layer(x))


class Paired(nn.Module):
    """A layer of two inputs, given one and its mirror image."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x.flip(-1))


class Cells(nn.Module):
    """A recurrent cell along a sequence."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = kind(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        state: Any = None
        for step in range(3):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(x.transpose(0, 1))
        return output.transpose(0, 1) + hidden[0][:, None]


class FromState(nn.Module):
    """A recurrent layer that begins from what another has left, or from something computed."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first = kind(6, 4, 2, batch_first=True, **options)
        self.second = kind(6, 4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.first(x)
        output, last = self.second(x.flip(1), state)
        hidden, cell = last if isinstance(last, tuple) else (last, last.tanh())
        return torch.cat([output[:, -1], *hidden, *cell], 1)


class Bags(nn.Module):
    """Rows of a table in bags of one length, by numbers from 0 to 2 that the input gives."""

    def __init__(self, mode: str, *, weighed: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.weighed = nn.EmbeddingBag(3, 4, mode=mode, padding_idx=padding), weighed

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x > 0).long() + (x > 1).long()
        return self.table(numbers, per_sample_weights=x.sigmoid() if self.weighed else None)


class CrossAttention(nn.Module):
    """Of packed projections only a part is applied to each input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(6, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x.flip(1)[:, 1:], tgt_mask=mask, tgt_is_causal=True)


class Masked(nn.Module):
    """A mask, and no word on whether it is a causal one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        if isinstance(self.layer, nn.Transformer):
            return self.layer(x.flip(1), x, tgt_mask=mask)
        return self.layer(x, mask=mask)


class ComputedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).relu(), self.encoder.weight.t(), self.encoder.bias.repeat(2)) @ torch.eye(6)


VECTOR, IMAGE, SEQUENCE, SIGNAL, VOLUME = (6,), (4, 6, 6), (5, 6), (4, 9), (2, 4, 4, 4)

LAYERS: dict[str, tuple[nn.Module | Callable[..., Tensor], tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 3), VECTOR),
    "linear over time": (nn.Linear(6, 3, bias=False), SEQUENCE),
    "conv1d": (nn.Conv1d(4, 3, 3, stride=2, padding=1, dilation=2), SIGNAL),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1, groups=2), IMAGE),
    "conv3d": (nn.Conv3d(2, 3, 2, stride=2), VOLUME),
    "conv2d same": (nn.Conv2d(4, 3, 3, padding="same"), IMAGE),
    "conv2d same, even kernel": (nn.Conv2d(4, 3, (2, 4), padding="same"), IMAGE),
    "conv2d valid": (nn.Conv2d(4, 3, 3, padding="valid"), IMAGE),
    "conv2d circular": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d reflect": (nn.Conv2d(4, 3, 3, padding=(1, 2), padding_mode="reflect"), IMAGE),
    "conv1d replicate": (nn.Conv1d(4, 3, 3, padding=2, padding_mode="replicate"), SIGNAL),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 3, 3, stride=2, output_padding=1), SIGNAL),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2), IMAGE),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 3, 2, bias=False), VOLUME),
    "max_pool1d": (nn.MaxPool1d(3, 2, 1, ceil_mode=True), SIGNAL),
    "max_pool2d": (nn.MaxPool2d(2, 1, dilation=2), IMAGE),
    "max_pool3d": (nn.MaxPool3d(2), VOLUME),
    "avg_pool1d": (nn.AvgPool1d(2, ceil_mode=True), SIGNAL),
    "avg_pool2d": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "avg_pool3d": (nn.AvgPool3d(2), VOLUME),
    "adaptive_avg_pool1d": (nn.AdaptiveAvgPool1d(4), SIGNAL),
    "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d((None, 2)), IMAGE),
    "adaptive_avg_pool3d": (nn.AdaptiveAvgPool3d(2), VOLUME),
    "adaptive_max_pool1d": (nn.AdaptiveMaxPool1d(2), SIGNAL),
    "adaptive_max_pool2d": (nn.AdaptiveMaxPool2d(2), IMAGE),
    "batch_norm1d": (nn.BatchNorm1d(6), VECTOR),
    "batch_norm1d over time": (nn.BatchNorm1d(4), SIGNAL),
    "batch_norm2d": (nn.BatchNorm2d(4, affine=False), IMAGE),
    "batch_norm3d": (nn.BatchNorm3d(2, eps=0.1), VOLUME),
    "instance_norm1d": (nn.InstanceNorm1d(4, affine=True), SIGNAL),
    "instance_norm2d": (nn.InstanceNorm2d(4), IMAGE),
    "instance_norm2d tracked": (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
    "instance_norm3d": (nn.InstanceNorm3d(2, affine=True), VOLUME),
    "group_norm": (nn.GroupNorm(2, 4), IMAGE),
    "layer_norm": (nn.LayerNorm(6), SEQUENCE),
    "layer_norm over two": (nn.LayerNorm((5, 6), bias=False), SEQUENCE),
    "layer_norm without tensors": (nn.LayerNorm(6, elementwise_affine=False), SEQUENCE),
    "rms_norm": (nn.RMSNorm(6), SEQUENCE),
    "prelu": (nn.PReLU(4, init=0.3), IMAGE),
    "prelu of one": (nn.PReLU(), VECTOR),
    "lstm": (Function(lambda x: x[0], nn.LSTM(6, 4, batch_first=True)), SEQUENCE),
    "lstm, time first": (TimeFirst(), SEQUENCE),
    "lstm states": (
        Function(lambda x: torch.cat([*x[1][0], *x[1][1]], 1), nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)),
        SEQUENCE,
    ),
    "gru": (Function(lambda x: x[1][1] + x[0][:, 0], nn.GRU(6, 4, 2, batch_first=True, bias=False)), SEQUENCE),
    "gru, both ways": (Function(lambda x: x[0], nn.GRU(6, 4, batch_first=True, bidirectional=True)), SEQUENCE),
    "lstm from a state": (FromState(nn.LSTM), SEQUENCE),
    "lstm from a state, both ways": (FromState(nn.LSTM, bidirectional=True), SEQUENCE),
    "gru from a state": (FromState(nn.GRU, bias=False, bidirectional=True), SEQUENCE),
    "rnn from a state": (FromState(nn.RNN, nonlinearity="relu"), SEQUENCE),
    "rnn": (Function(lambda x: x[0], nn.RNN(6, 4, batch_first=True)), SEQUENCE),
    "rnn relu": (Function(lambda x: x[0], nn.RNN(6, 4, nonlinearity="relu", batch_first=True)), SEQUENCE),
    "numbers become columns": (Function(lambda x: x / x.norm(dim=1).unsqueeze(1) + x.sum(1)[:, None]), VECTOR),
    "a number by itself": (Function(lambda x: torch.lerp(x, x.relu(), 0.3) + x.new_zeros(())), VECTOR),
    "bilinear": (Paired(nn.Bilinear(6, 6, 3)), SEQUENCE),
    "bilinear without a bias": (Paired(nn.Bilinear(6, 6, 3, bias=False)), VECTOR),
    "lstm cell": (Cells(nn.LSTMCell), SEQUENCE),
    "gru cell": (Cells(nn.GRUCell), SEQUENCE),
    "rnn cell": (Cells(nn.RNNCell), SEQUENCE),
    "multi-head attention": (nn.TransformerEncoderLayer(6, 3, 8, batch_first=True), SEQUENCE),
    "norm first": (nn.TransformerEncoderLayer(6, 2, 8, norm_first=True, activation="gelu", batch_first=True), SEQUENCE),
    "decoder": (
        Function(lambda x: x, nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 4, 8, batch_first=True))),
        SEQUENCE,
    ),
    "a mask for an encoder": (
        Masked(nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2)),
        SEQUENCE,
    ),
    "a mask for a transformer": (Masked(nn.Transformer(6, 2, 1, 1, 8, batch_first=True)), SEQUENCE),
    "pixel shuffle": (nn.PixelShuffle(2), IMAGE),
    "channel shuffle": (nn.ChannelShuffle(2), IMAGE),
    "upsample nearest": (nn.Upsample(scale_factor=2), IMAGE),
    "upsample bilinear": (nn.Upsample(size=(9, 7), mode="bilinear", align_corners=True), IMAGE),
    "upsample bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "upsample linear": (nn.Upsample(scale_factor=2, mode="linear"), SIGNAL),
    "upsample trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "upsample exact": (nn.Upsample(size=(4, 9), mode="nearest-exact"), IMAGE),
    "zero pad": (nn.ZeroPad2d((1, 2, 0, 1)), IMAGE),
    "pad by a value": (nn.ConstantPad1d((1, 2), 0.5), SIGNAL),
    "pad replicate": (nn.ReplicationPad2d(1), IMAGE),
    "crop": (nn.ZeroPad2d(-1), IMAGE),
    "glu": (nn.GLU(1), IMAGE),
    "dropout": (nn.Sequential(nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()), IMAGE),
    "bilinear as einsum": (lambda x: torch.einsum("bti,bsi->bts", x, x * 2), SEQUENCE),
    "identity": (nn.Identity(), VECTOR),
}
for name in (
    "ReLU", "Tanh", "Sigmoid", "GELU", "SiLU", "ReLU6", "Hardswish", "Hardsigmoid", "LeakyReLU", "ELU", "SELU", "CELU",
    "Mish", "Softplus", "Softsign", "LogSigmoid", "Hardtanh", "Softmin", "Tanhshrink", "Softmax", "LogSoftmax",
):  # fmt: skip
    LAYERS[name] = (getattr(nn, name)(**({"dim": 1} if name in ("Softmax", "LogSoftmax", "Softmin") else {})), IMAGE)
LAYERS |= {
    "gelu tanh": (nn.GELU(approximate="tanh"), VECTOR),
    "elu 0.5": (nn.ELU(0.5), VECTOR),
    "celu 0.5": (nn.CELU(0.5), VECTOR),
    "softplus 2": (nn.Softplus(2.0, 3.0), VECTOR),
    "clamp": (lambda x: x.clamp(min=-0.5) + x.clamp(max=0.3) + x.clamp(-1, 1), VECTOR),
    "powers": (lambda x: x**2 + x.abs().sqrt() + (x.abs() + 1).rsqrt() + (x * x + 1) ** -0.5 + x.square(), VECTOR),
    "exp, log": (lambda x: x.exp() + (x.abs() + 1).log() + torch.erf(x) + 1 / (x.abs() + 1), VECTOR),
    "sin, cos": (lambda x: torch.sin(x) + torch.cos(x) - torch.neg(x), VECTOR),
    "scalars": (lambda x: (1 - x) * 3 / 2 + 5 - 0.5 * x, VECTOR),
    "alpha": (lambda x: torch.add(x, x * x, alpha=2) - torch.sub(x, x.tanh(), alpha=3), VECTOR),
    "values": (lambda x: x * x.tanh() - x / (x.abs() + 1) + torch.maximum(x, -x) - torch.minimum(x, x * 2), VECTOR),
    "where": (lambda x: torch.where(x > 0, x, x * 0.1) + torch.where(x <= 1, 2.0, x), VECTOR),
    "where not": (lambda x: torch.where(x == 0, x, 0.0) + torch.where(x != 0, x, -x), VECTOR),
    "masked fill": (lambda x: x.masked_fill(x < 0, -1.0).masked_fill(~(x >= 1), 2.0), VECTOR),
    "means": (lambda x: x.mean((2, 3)) + x.sum((2, 3)) + x.amax((2, 3)), IMAGE),
    "kept means": (lambda x: x - x.mean(1, keepdim=True) + x.sum(-1, keepdim=True), IMAGE),
    "layout": (lambda x: x.permute(0, 2, 3, 1).contiguous().transpose(1, 2).flatten(1, 2), IMAGE),
    "more layout": (lambda x: x.unsqueeze(1).squeeze(1).unflatten(1, (2, 2)).movedim(1, -1).swapaxes(1, 2), IMAGE),
    "views": (lambda x: x.view(x.size(0) * 4, 6, 6).mean(2).view(-1, 4 * 6), IMAGE),
    "parts": (lambda x: torch.cat([*x.chunk(2, 1), *x.split([1, 3], 1), x[:, 1:3], x[:, -1:]], 1), IMAGE),
    "stack": (lambda x: torch.stack([*x.unbind(1), x.select(1, 2)], 2), IMAGE),
    "expand": (lambda x: x.mean(1, keepdim=True).expand(-1, 7, -1, -1) + x.new_zeros(x.size(0), 7, 6, 6), IMAGE),
    "filled": (lambda x: torch.cat([x, torch.ones(x.size(0), 2), torch.full_like(x, 3.0)], 1), VECTOR),
    "products": (lambda x: torch.bmm(x, x.transpose(1, 2)) @ x, SEQUENCE),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x.tanh(), is_causal=True), SEQUENCE),
    "attention scale": (lambda x: F.scaled_dot_product_attention(x, x, x * 3, scale=0.3), SEQUENCE),
    "attention mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.tril(torch.ones(5, 5, dtype=torch.bool))), SEQUENCE,
    ),
    "constants": (lambda x: x + torch.arange(6) * torch.linspace(0, 1, 6), VECTOR),
    "casts": (lambda x: (x > 0).float() * x + (x > 1).to(x.dtype), VECTOR),
    "softmax": (lambda x: x.softmax(-1) + x.log_softmax(1), SEQUENCE),
    "in place": (lambda x: (x * 1).add_(2).relu_().mul_(x), VECTOR),
}  # fmt: skip
LAYERS |= {
    "repeat": (
        lambda x: torch.cat([torch.ones(1, 1, 6).repeat(x.shape[0], 2, 1), x.repeat(1, 2, 1).tile(1, 1, 1)], 1),
        SEQUENCE,
    ),
    "repeat interleave": (lambda x: x.repeat_interleave(2, 1), SEQUENCE),
    "steps": (
        lambda x: x[..., ::2] + x[..., 1::2] + x[:, ::3].mean(1, keepdim=True)[..., 1:5:2].sum(-1, keepdim=True),
        SEQUENCE,
    ),
    "flip, roll": (lambda x: x.flip(1, -1) + torch.roll(x, (1, -2), (1, 2)) + x.roll(6, -1), IMAGE),
    "indices": (lambda x: x[:, [2, 0]] + x.index_select(1, torch.tensor([3, 3])), IMAGE),
    "indices in a shape": (lambda x: x[:, :, torch.tensor([[0, 1], [2, -1]])], SEQUENCE),
    "pairs of indices": (
        lambda x: (x @ x.transpose(1, 2))[:, torch.tensor([1, 2, 2]), torch.tensor([0, 0, 1])],
        SEQUENCE,
    ),
    "largest, smallest": (
        lambda x: x.max(1)[0] + x.min(1).values + x.amin(1) + torch.max(x, -x).sum(1) + torch.min(x, -x).sum(1),
        SEQUENCE,
    ),
    "where the largest is": (lambda x: x.argmax(-1) + x.max(-1)[1] - 2 * x.argmin(2) + 3 * x.min(2).indices, SEQUENCE),
    "deviation": (
        lambda x: (
            (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5) + x.var(1, unbiased=False, keepdim=True)
        ),
        SEQUENCE,
    ),
    "variance and mean": (lambda x: cast(Tensor, sum(torch.var_mean(x, dim=(2, 3)))), IMAGE),
    "norms": (
        lambda x: x.norm(dim=-1) + x.norm(p=1, dim=-1) + torch.linalg.vector_norm(x, float("inf"), dim=-1),
        SEQUENCE,
    ),
    "normalize": (lambda x: F.normalize(x, dim=1) + F.cosine_similarity(x, x * 2 + 1, dim=1)[:, None], SEQUENCE),
    "cumulative sum": (lambda x: x.cumsum(1) + (x > 0).cumsum(-1), SEQUENCE),
    "rounding": (lambda x: x.floor() + x.round() + x.ceil() + x % 2 + x // 3, VECTOR),
    "more functions": (
        lambda x: x.sign() * x.abs().log1p() + x.expm1() + 2**x + F.softshrink(x) + F.hardshrink(x),
        VECTOR,
    ),
    "truth": (
        lambda x: ((x > 0) & (x < 1)).float() + ((x > 1) | (x < -1)).float() + ((x > 0) ^ (x < 1)).float(),
        VECTOR,
    ),
    "any, all": (lambda x: (x > 1).any(1).float() + 2 * (x > -1).all(1).float(), SEQUENCE),
    "two values compared": (
        lambda x: (x > x * 2).float() + (x.long() == (x * 2).long()).float() + torch.isnan(x),
        VECTOR,
    ),
    "where numbers": (lambda x: x + torch.where(x > 0, 0.0, -float("inf")).clamp(min=torch.tensor(-9.0)), VECTOR),
    "repeated heads": (
        lambda x: F.scaled_dot_product_attention(
            x.view(-1, 4, 3, 12), x.view(-1, 4, 3, 12)[:, :2], x.view(-1, 4, 3, 12)[:, :2], enable_gqa=True
        ),
        IMAGE,
    ),
    "factors": (lambda x: torch.baddbmm(x[:, :, :5], x, x.transpose(1, 2), beta=0.5, alpha=2), SEQUENCE),
    "narrow": (lambda x: x.narrow(1, 1, 3) + torch.tensor_split(x, (3,), 1)[0], SEQUENCE),
    "local response": (nn.LocalResponseNorm(2), IMAGE),
    "what only depends on the batch size": (
        lambda x: (
            x
            + torch.arange(5).expand(x.shape[0], 5)[torch.arange(x.shape[0])[:, None], torch.arange(5)[None]][..., None]
        ),
        SEQUENCE,
    ),
    "unused random numbers": (lambda x: (torch.rand(3), x + 1)[1], VECTOR),
    "the largest of a dimension": (lambda x: x.topk(3, 1)[0] + x.topk(3, 1, largest=False)[0].flip(1), SEQUENCE),
    "where the largest lie": (lambda x: x.topk(2)[1] * 2 + x.topk(2, sorted=True).values.long(), SEQUENCE),
    "picked for each": (
        lambda x: x.gather(1, (x > 0).long()[:, :2]) + x.gather(-1, (x > 1).int().long())[:, 1:3],
        SEQUENCE,
    ),
    "picked from a part": (lambda x: x.gather(1, (x > 0).long()[:, 1:, :4]), SEQUENCE),
    "one picked for all": (lambda x: x.gather(1, x.mean(2).argmax(1)[:, None, None].expand(-1, 1, 6)), SEQUENCE),
    "one picked by its place": (lambda x: x.gather(1, x.topk(2, 1)[1]).mean(1), SEQUENCE),
    "one hot": (lambda x: F.one_hot((x > 0).long() + (x > 1).long(), 4).float() * x[..., None], VECTOR),
    "bags, summed up": (Bags("sum"), VECTOR),
    "bags, weighed": (Bags("sum", weighed=True), VECTOR),
    "bags, averaged": (Bags("mean"), VECTOR),
    "bags, the largest": (Bags("max"), VECTOR),
    "bags, summed up without padding": (Bags("sum", padding=0), VECTOR),
    "bags, averaged without padding": (Bags("mean", padding=1), VECTOR),
    "cross attention": (Function(lambda x: x, CrossAttention()), SEQUENCE),
    "computed weights": (Function(lambda x: x, ComputedWeights()), SEQUENCE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_graph_computes_what_the_module_does(name):
    torch.manual_seed(0)
    module, shape = LAYERS[name]
    module = (module if isinstance(module, nn.Module) else Function(module)).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None:
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    graph = trace(module, torch.randn(2, *shape))
    model = CompressedModel(from_state(module, graph=graph), graph)
    network = to_module(model)
    for batch in (1, 3):
        x = torch.randn(batch, *shape)
        expected = module(x)
        assert torch.allclose(network(x), expected, atol=1e-5)
        assert network(x).dtype == expected.dtype
        stated = shapes(model)[graph.outputs[0]]
        assert tuple(-size * batch if size < 0 else size for size in stated) == tuple(expected.shape)
    prove_same(model, drop_dead_units(model), torch.randn(2, *shape))


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (lambda x: x.sort(1)[0], VECTOR, r"'aten.sort.default', used in the network's own forward, is not in the"),
        (lambda x: x + torch.rand(6), VECTOR, r"'aten.rand.default' that draws random numbers"),
        (lambda x: x.mean(0, keepdim=True) + x, VECTOR, r"'aten.mean.dim' over the batch"),
        (lambda x: x.flip(0), VECTOR, r"'aten.flip.default' along the batch"),
        (lambda x: x + torch.arange(x.shape[0])[:, None], VECTOR, "on a sample's place in the batch"),
        (lambda x: x / x.shape[0], VECTOR, "aten.div.Tensor"),
        (lambda x: F.conv2d(x, x.mean((0, 2, 3)).reshape(1, 4, 1, 1)), IMAGE, r"'aten.mean.dim' over the batch"),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 1, 1) * 2), IMAGE, r"'aten.conv2d.default' with mul.* is computed"),
        (lambda x: x.topk(1, 0)[0] + x, VECTOR, r"'aten.topk.default' over the batch"),
        (lambda x: x.gather(0, (x > 0).long()), VECTOR, r"'aten.gather.default' along the batch"),
        (Bags("max", padding=0), VECTOR, "that takes the largest and has padding, used in 'function.table'"),
        (lambda x: x[x > 0], VECTOR, "can't follow|is not in the closed list"),
    ],
)  # fmt: skip
def test_what_no_graph_can_say_is_named(function, shape, message):
    with pytest.raises((UnknownOperator, UntraceableModel), match=message):
        trace(Function(function), torch.randn(2, *shape))


def test_the_list_the_rules_and_the_functions_are_one():
    assert set(RULES) == set(OPERATORS)
    assert sorted(OPERATOR_OF_OPCODE) == list(range(1, len(OPERATORS) + 1))


def test_torch_asks_again_for_causal_masks_afterwards():
    trace(nn.Linear(3, 2), torch.zeros(2, 3))
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert nn.modules.transformer._detect_is_causal_mask(mask)
