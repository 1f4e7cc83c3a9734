"""Every odd tensor, type, module and run: compressed, or refused with one error that names what is at fault."""

import errno
import math
import os
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, Dataset

import bayeszip
from bayeszip import codec
from bayeszip.errors import BayeszipError, DataError, ModelError, OutputError, RecipeError, TrainingError
from bayeszip.fitting import ResidentBatches, Watcher
from bayeszip.fitting.keeper import Checkpointing
from bayeszip.recipe import recipe

#: Everything on: distillation, mixture, compaction, the closing step; an epoch of each phase.
QUICK = recipe("quick").override("epochs_scale=0.001", "mixture.components=5")
INPUTS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3


class Silent(Watcher):
    """No display."""

    def on_warning(self, message: str) -> None:
        """No warnings."""


def compress(network, *, data=None, settings=QUICK, **options):
    batches = ResidentBatches(INPUTS, LABELS, 8) if data is None else data
    return bayeszip.compress(network, batches, recipe=settings, device="cpu", watcher=Silent(), **options)


def check(network, result, inputs=INPUTS) -> None:
    """The file decodes, and holds a network that takes the same inputs to finite outputs of the same shape."""
    assert codec.decode(result.blob) == result.compressed
    with torch.no_grad():
        outputs = result.network()(inputs)
        assert outputs.shape == network.eval()(inputs).shape
    assert torch.isfinite(outputs.float()).all()


def mlp(hidden: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def with_weights(change) -> nn.Sequential:
    """A network whose first weight is what `change` makes of it."""
    network = mlp()
    first = network[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(change(first.weight.detach()))
    return network


def filled(values) -> torch.Tensor:
    return torch.tensor(values).repeat(30)[:30].reshape(5, 6)


class Beside(nn.Module):
    """A network with a parameter of its own, that takes part in what it computes."""

    def __init__(self, parameter, use=lambda x, p: x, trained: bool = True) -> None:
        super().__init__()
        self.net, self.use = mlp(), use
        self.own = nn.Parameter(parameter, requires_grad=trained)

    def forward(self, x):
        return self.use(self.net(x), self.own)


def beside(kind: str) -> Beside:
    return Beside(torch.ones(3).to(getattr(torch, kind)), lambda x, p: x * p.float(), trained=False)


TENSORS = {
    "empty": lambda: Beside(torch.empty(0, 4)),
    "0-d": lambda: Beside(torch.tensor(2.0), lambda x, p: x * p),
    "one weight": lambda: nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, 3)),
    "fewer weights than components": lambda: nn.Sequential(nn.Linear(6, 1, bias=False), nn.Linear(1, 3, bias=False)),
    "all zero": lambda: with_weights(torch.zeros_like),
    "all equal": lambda: with_weights(lambda w: torch.full_like(w, 0.3)),
    "an outlier among zeros": lambda: with_weights(lambda w: torch.zeros_like(w).index_fill_(0, torch.tensor(1), 3.0)),
    "negative zero": lambda: with_weights(lambda w: torch.full_like(w, -0.0)),
    "denormals": lambda: with_weights(lambda w: w * 1e-40),
    "1e-38": lambda: with_weights(lambda w: w * 1e-38),
    "huge offset, tiny spread": lambda: with_weights(lambda w: 1e4 + 1e-3 * w),
    "two distinct values": lambda: with_weights(lambda w: w.sign() * 0.2),
    "already quantized": lambda: with_weights(lambda w: (w * 8).round() / 8),
    "more than 2**16 values": lambda: nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(300, 3)),
    "pruned filters": lambda: with_weights(lambda w: w * (torch.arange(5) > 2)[:, None]),
    "transposed": lambda: with_weights(lambda w: torch.randn(6, 5).T),
    "expanded": lambda: with_weights(lambda w: torch.randn(5, 1).expand(5, 6)),
    "sliced": lambda: with_weights(lambda w: torch.randn(10, 12)[::2, ::2]),
    "channels last": lambda: nn.Sequential(  # type: ignore[call-overload]  # torch's stub leaves memory_format out
        nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).to(memory_format=torch.channels_last),
    "half": lambda: mlp().half(),
    "bfloat16": lambda: mlp().bfloat16(),
    "double": lambda: mlp().double(),
    "mixed types": lambda: nn.Sequential(nn.Linear(6, 5), Cast(torch.bfloat16), nn.Linear(5, 3).bfloat16()),
    **{f"a {kind} parameter": partial(beside, kind) for kind in ("bool", "uint8", "int8", "int16", "int32", "int64")},
}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_and_types(name):
    network = TENSORS[name]()
    dtype = next(p.dtype for p in network.parameters() if p.is_floating_point())
    inputs = INPUTS.to(dtype) if dtype.itemsize > 1 else INPUTS
    result = compress(network, data=ResidentBatches(inputs, LABELS, 8))
    check(network, result, inputs)


REFUSED_TENSORS = {
    "NaN": (lambda: with_weights(lambda w: w * math.nan), r"0\.weight holds 30 values that are NaN or infinite"),
    "inf": (lambda: with_weights(lambda w: w + math.inf), r"0\.weight holds 30 values that are NaN or infinite"),
    "-inf": (lambda: with_weights(lambda w: w - math.inf), r"0\.weight holds 30 values that are NaN or infinite"),
    "meta": (lambda: with_weights(lambda w: w.to("meta")), r"0\.weight has no values yet"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)), r"0\.weight has no values yet"),
    "sparse": (
        lambda: with_weights(lambda w: w.to_sparse()),
        r"0\.weight is a torch\.sparse_coo .* tensor; only dense",
    ),
    "CSR": (lambda: with_weights(csr), r"0\.weight is a torch\.sparse_csr .* tensor; only dense"),
    "quantized": (lambda: Beside(quantized(), trained=False), r"own is a .* qint8 tensor; only dense"),
    "complex": (lambda: with_weights(lambda w: w.to(torch.complex64)), r"0\.weight is a complex64 tensor"),
    "fp8": (lambda: with_weights(lambda w: w.to(torch.float8_e4m3fn)), r"0\.weight is a float8_e4m3fn tensor"),
    "1e38": (
        lambda: with_weights(lambda w: w * 1e38),
        r"0\.weight holds values up to \d\.\de\+37, whose squares are infinite; scale them down",
    ),
    "a complex parameter": (lambda: Beside(torch.ones(3, dtype=torch.complex64)), r"own is a complex64 tensor"),
    "an fp8 parameter": (lambda: Beside(torch.ones(3).to(torch.float8_e5m2)), r"own is a float8_e5m2 tensor"),
}


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will give this up one day
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def csr(w: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a beta
        return w.to_sparse_csr()


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_refused_tensors(name):
    build, message = REFUSED_TENSORS[name]
    with pytest.raises(BayeszipError, match=message) as caught:
        compress(build())
    assert len(str(caught.value)) < 400


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class SharedStorage(nn.Module):
    """Two parameters that overlap in memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(8, 6) / 3
        self.first, self.last = nn.Linear(6, 5), nn.Linear(6, 3)
        self.first.weight = nn.Parameter(memory[:5])
        self.last.weight = nn.Parameter(memory[5:])
        self.middle = nn.Linear(5, 6)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("shift", torch.full((6,), 0.5), persistent=False)

    def forward(self, x):
        return self.net(x * self.scale + self.shift)


class Branching(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x) if x.sum() > -1e9 else self.net(-x)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, mlp())

    def forward(self, x):
        return getattr(self, self.name)(x)


class Custom(nn.Module):
    """A layer of its own making, with a weight that no stock layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.mix = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return self.net(x) @ self.mix


class Subclass(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Wrapped(nn.Module):
    """As DistributedDataParallel holds a network: under `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = mlp()

    def forward(self, x):
        return self.module(x)


def batch_norm(**changes) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, track_running_stats=changes.pop("track", True), affine=changes.pop("affine", True))
    for name, value in changes.items():
        getattr(norm, name).fill_(value)
    return nn.Sequential(nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 3))


MODULES = {
    "tied weights": Tied,
    "shared storage": SharedStorage,
    "buffers": Buffered,
    "BatchNorm": batch_norm,
    "BatchNorm with variance 0": lambda: batch_norm(running_var=0.0),
    "BatchNorm without statistics": lambda: batch_norm(track=False),
    "BatchNorm without weights": lambda: batch_norm(affine=False),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3)),
    "an own parametrization": lambda: parametrized(),
    "module. in front": Wrapped,
    "compiled": lambda: torch.compile(mlp(), backend="eager"),
    "a custom layer": Custom,
    "a subclass": lambda: nn.Sequential(Subclass(6, 5), nn.ReLU(), nn.Linear(5, 3)),
    "control flow": Branching,
    "Dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
    "a unicode name": lambda: Named("θ網"),
    "a very long name": lambda: Named("x" * 900),
    "an odd name": lambda: Named("/a b\n"),
    "training mode left on": lambda: batch_norm().train(),
    "frozen": lambda: mlp().requires_grad_(False),
    "in double, BatchNorm": lambda: batch_norm().double(),
}


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized() -> nn.Sequential:
    network = mlp()
    parametrize.register_parametrization(network[0], "weight", Double())
    return network


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*torch.compile.*", "ignore::DeprecationWarning:torch")
def test_modules(name):
    network = MODULES[name]()
    inputs = INPUTS.to(next(network.parameters()).dtype)
    result = compress(network, data=ResidentBatches(inputs, LABELS, 8))
    check(network, result, inputs)


def test_embedding_with_padding():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    words = torch.randint(0, 9, (24, 3))
    result = compress(network, data=ResidentBatches(words, LABELS, 8))
    check(network, result, words)
    zeros = torch.zeros(1, 3, dtype=torch.long)
    assert torch.isfinite(result.network()(zeros)).all()


REFUSED_MODULES = {
    "a class": (lambda: nn.Linear, "a network is a torch.nn.Module, not the class Linear; give the network itself"),
    "no parameters": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), "no layer that can be compressed"),
    "no layer": (lambda: nn.Sequential(nn.PReLU()), "no layer that can be compressed; these can: Linear"),
    "BatchNorm with NaN": (lambda: batch_norm(running_mean=math.nan), r"1\.running_mean"),
}


@pytest.mark.parametrize("name", REFUSED_MODULES)
def test_refused_modules(name):
    build, message = REFUSED_MODULES[name]
    with pytest.raises(BayeszipError, match=message):
        compress(build(), val_loader=[(INPUTS, LABELS)])


class Stopped(Exception):
    """Raised by somebody who wants to see it again."""


class Unreadable(Dataset):
    """Examples of which one can't be read."""

    def __init__(self, at: int, kind: type[Exception] = OSError) -> None:
        self.at, self.kind = at, kind

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        if index == self.at:
            raise self.kind("image 7 is cut off")
        return INPUTS[index], LABELS[index]


class TestRuns:
    """Data and settings at their limits."""

    def test_no_sample(self):
        with pytest.raises(DataError, match="gave no batch"):
            compress(mlp(), data=ResidentBatches(INPUTS[:0], LABELS[:0], 8))

    def test_no_sample_to_validate_on(self):
        with pytest.raises(DataError, match="nothing to evaluate on"):
            compress(mlp(), val_loader=[])

    def test_one_sample(self):
        check(mlp(), compress(mlp(), data=ResidentBatches(INPUTS[:1], LABELS[:1], 8)))

    def test_a_last_batch_of_one_with_batch_norm(self):
        message = r"phase vd, epoch 1 of 1: .* leave out a last batch of one example \(drop_last\)"
        with pytest.raises(TrainingError, match=message):
            compress(batch_norm(), data=ResidentBatches(INPUTS[:17], LABELS[:17], 8))
        check(batch_norm(), compress(batch_norm(), data=ResidentBatches(INPUTS[:17], LABELS[:17], 8, drop_last=True)))

    def test_a_generator_in_place_of_a_loader(self):
        with pytest.raises(DataError, match="train_loader is a generator, which gives its batches once; give a list"):
            compress(mlp(), data=(batch for batch in [(INPUTS, LABELS)]), example_inputs=(INPUTS[:2],))

    @pytest.mark.parametrize(
        ("workers", "told"),
        [
            (0, r"OSError: image 7 is cut off \(.*test_inputs_compress\.py, line \d+\)$"),
            (1, r"(?s)OSError: Caught OSError in DataLoader worker.*test_inputs_compress\.py.*image 7 is cut off"),
        ],
    )
    @pytest.mark.parametrize("at", [0, 20], ids=["in the first batch", "later"])
    def test_data_that_cannot_be_read(self, at, workers, told):
        """Whoever wrote the data set is told where it fails."""
        with pytest.raises(DataError, match=told) as caught:
            compress(mlp(), data=DataLoader(Unreadable(at), 8, num_workers=workers))
        assert str(caught.value).startswith("the loader fails to give a batch: ")

    def test_validation_data_that_cannot_be_read(self):
        with pytest.raises(DataError, match="the loader fails to give a batch: OSError: image 7 is cut off"):
            compress(mlp(), val_loader=DataLoader(Unreadable(20), 8))

    def test_errors_of_the_callers_own_kinds_pass(self):
        with pytest.raises(Stopped):
            compress(mlp(), data=DataLoader(Unreadable(20, Stopped), 8))

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda outputs, targets: 1.0, "must be one number, a mean over the batch, as a tensor; it is a float"),
            (lambda outputs, targets: outputs.square().sum(1), r"must be one number, .*; it is of shape \(8,\)"),
            (lambda outputs, targets: outputs.detach().square().mean(), "doesn't depend on the network's weights"),
        ],
    )
    def test_a_loss_that_is_none(self, loss, message):
        with pytest.raises(BayeszipError, match=message):
            compress(mlp(), loss=loss)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rates": 2.0}, "rates are several numbers"),
            ({"augment": 3}, "augment is text, an Augmentation, or a function of a batch, not 3"),
            ({"settings": None}, "a recipe is a name, a path to a JSON file, or a Recipe, not None"),
            ({"settings": ["quick"]}, r"a recipe is a name, .*, not \['quick'\]"),
            ({"include": 3}, r"include is a list of patterns on names, such as \['encoder\.\*'\], not 3"),
            ({"strengths": ["fc1"]}, r"strengths are factors by pattern, such as \{.*\}, not \['fc1'\]"),
            ({"seed": "a"}, "seed must be a whole number of at most 64 bits, not 'a'"),
            ({"seed": 2**64}, "seed must be a whole number of at most 64 bits"),
        ],
    )
    def test_options_that_are_something_else(self, options, message):
        with pytest.raises(RecipeError, match=message):
            compress(mlp(), **options)

    @pytest.mark.parametrize("watcher", [print, Watcher])
    def test_a_watcher_that_is_none(self, watcher):
        with pytest.raises(RecipeError, match=r"watcher must be an instance of bayeszip\.Watcher .*, not <"):
            bayeszip.compress(mlp(), [(INPUTS, LABELS)], recipe=QUICK, device="cpu", watcher=watcher)

    @pytest.mark.parametrize("settings", [3, [("all.tau1", 2)]])
    def test_settings_that_are_something_else(self, settings):
        with pytest.raises(RecipeError, match=r"settings are \{'all\.tau1': 2\}, or"):
            bayeszip.compress(mlp(), [(INPUTS, LABELS)], settings=settings, device="cpu")

    @pytest.mark.parametrize("examples", [3, {"input": 3}])
    def test_example_inputs_that_are_something_else(self, examples):
        with pytest.raises(DataError, match=r"example_inputs must be tensors.*(, not 3|; input is int)"):
            compress(mlp(), example_inputs=examples)

    @pytest.mark.parametrize("network", [None, nn.Linear, {"weight": torch.zeros(2, 2)}])
    def test_no_network(self, network):
        with pytest.raises(ModelError, match=r"a network is a torch\.nn\.Module, not "):
            compress(network)

    def test_targets_that_lie_in_the_image_are_not_left_behind(self):
        net = nn.Conv2d(1, 3, 3, padding=1)
        images, masks = torch.randn(16, 1, 6, 6), torch.randint(0, 3, (16, 6, 6))
        for data in (ResidentBatches(images, masks, 8), [(images, masks)]):
            with pytest.raises(BayeszipError, match="would move images and leave their targets"):
                compress(net, data=data, augment="shift=1,flip")
            assert compress(net, data=data, augment="cutout=2").bytes

    def test_all_labels_equal(self):
        result = compress(mlp(), data=ResidentBatches(INPUTS, torch.zeros_like(LABELS), 8))
        check(mlp(), result)

    def test_labels_out_of_range(self):
        with pytest.raises(TrainingError, match=r"phase vd, epoch 1 of 1: .* Target 7 is out of bounds"):
            compress(mlp(), data=ResidentBatches(INPUTS, LABELS + 7, 8))

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_data_that_is_not_finite(self, value):
        inputs = INPUTS.clone()
        inputs[9, 2] = value
        with pytest.raises(TrainingError, match=r"step 2: the data \(inputs of 1 of 8 examples of the batch\)"):
            compress(mlp(), data=ResidentBatches(inputs, LABELS, 8))

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param([f"all.rate_{name}=0" for name in ("theta", "log_sigma2", "means")], id="rates of 0"),
            pytest.param(["all.tau1=0", "all.tau1_ramp=0"], id="τ₁ of 0"),
            pytest.param(["closing.epochs=0"], id="no closing step"),
            pytest.param(["mixture.components=1"], id="1 component"),
            pytest.param(["mixture.components=2"], id="2 components"),
            pytest.param(["mixture.components=200"], id="more components than weights"),
            pytest.param(["all.distillation=1"], id="distillation alone"),
            pytest.param(["all.tau1=1000000", "all.rate_log_sigma2=10"], id="everything pruned"),
        ],
    )
    def test_settings(self, changes):
        check(mlp(), compress(mlp(), settings=QUICK.override(*changes)))

    def test_no_epochs(self):
        """As trained as they come, the weights are quantized and coded."""
        settings = QUICK.override("vd.epochs=0", "vd+sws.epochs=0", "closing.epochs=0")
        check(mlp(), compress(mlp(), settings=settings))

    def test_no_mixture_to_read_from(self):
        with pytest.raises(
            BayeszipError, match=r"no phase trains the mixture \(τ₂ > 0\); set quantization\.assignment"
        ):
            compress(mlp(), settings=QUICK.override("all.tau2=0"))


@pytest.fixture(scope="module")
def result():
    return compress(mlp())


class TestPaths:
    """Where results and checkpoints go."""

    @pytest.mark.parametrize("name", ["θ 網.bayz", " ", "-o", "a" * 250])
    def test_odd_names(self, result, tmp_path, name):
        result.save(tmp_path / name)
        assert torch.equal(bayeszip.load(tmp_path / name)(INPUTS), result.model(INPUTS))

    def test_a_folder(self, result, tmp_path):
        with pytest.raises(OutputError, match="it is a folder; name a file in it"):
            result.save(tmp_path)

    def test_checkpoints_in_a_folder_with_an_odd_name(self, tmp_path):
        result = compress(mlp(), checkpoints=tmp_path / "θ 網")
        assert compress(mlp(), checkpoints=tmp_path / "θ 網", resume=True).blob == result.blob

    def test_checkpoints_where_a_file_is(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match=r"can't create the folder .*file"):
            compress(mlp(), checkpoints=tmp_path / "file")

    @pytest.mark.parametrize("call", ["open", "write", "fsync"])
    @pytest.mark.parametrize("code", ["ENOSPC", "EROFS"])
    def test_a_disk_that_takes_nothing(self, result, tmp_path, monkeypatch, call, code):
        def fail(*arguments, **options):
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

        monkeypatch.setattr(f"bayeszip.files.os.{call}", fail)
        with pytest.raises(OutputError, match="the disk is"):
            result.save(tmp_path / "net.bayz")
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == []

    def test_a_read_only_folder_for_checkpoints(self, tmp_path, monkeypatch):
        real = os.open

        def refuse(path, flags, *rest):
            if flags & os.O_CREAT:
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, flags, *rest)

        monkeypatch.setattr("bayeszip.files.os.open", refuse)
        with pytest.raises(OutputError, match="permission denied; choose a folder you may write to"):
            compress(mlp(), checkpoints=Checkpointing(tmp_path / "checkpoints"))


class Scaled(nn.Module):
    """Takes a number beside its inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, scale):
        return self.layer(x * scale)


def test_a_number_beside_the_examples_is_refused_by_name():
    scaled = [{"x": INPUTS, "scale": torch.tensor(2.0), "labels": LABELS}]
    with pytest.raises(DataError, match=r"the input scale of a batch is one number, .* repeat the number"):
        compress(Scaled(), data=scaled)
    with pytest.raises(DataError, match="the target of a batch is one number"):
        compress(mlp(), data=[(INPUTS[0], LABELS[0])])
