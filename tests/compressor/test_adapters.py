"""The callbacks with the real libraries: a file comes out, small and accurate, and interrupted runs go on."""

import copy
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import bayeszip
from bayeszip.errors import ModelError, TrainingError
from bayeszip.fitting import evaluate
from bayeszip.recipe import recipe

RECIPE = recipe("quick").override(
    "all.epochs=8", "vd.tau1=0.3", "vd+sws.tau1=0.3", "all.rate_log_sigma2=0.02", "mixture.components=9"
)


def blobs(n=512, seed=0):
    """Gaussian clouds; only the first four of twelve features tell the three classes apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    inputs = torch.randn(n, 12, generator=generator)
    inputs[:, :4] += 3 * F.one_hot(labels, 4).float()
    return inputs, labels


@pytest.fixture(scope="module")
def pretrained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        inputs, targets = blobs()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


@pytest.fixture
def model(pretrained):
    return copy.deepcopy(pretrained)


@pytest.fixture(autouse=True)
def _foreign_warnings():
    """Those of the libraries themselves are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_file(path, result, model):
    assert path.read_bytes() == result.blob
    assert evaluate(bayeszip.load(path), [blobs(seed=2)]) > 0.95
    assert result.ratio > 5
    assert type(model[0]) is nn.Linear


def module_of(network):
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network
            self.example_input_array = torch.zeros(2, 12)

        def training_step(self, batch, index):
            inputs, targets = batch
            return F.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 0.005)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)]

    return Classifier()


def lightning_fit(network, *callbacks, checkpoint=None, validation=None, module=None, **options):
    from lightning.pytorch import Trainer, seed_everything

    seed_everything(1, verbose=False)
    trainer = Trainer(
        max_epochs=12,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **options,
    )
    training = DataLoader(TensorDataset(*blobs()), 32, shuffle=True)
    trainer.fit(module or module_of(network), training, validation, ckpt_path=checkpoint)
    return trainer


ALL = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "precision": "bf16-mixed"}


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_lightning(model, tmp_path, options):
    callback = bayeszip.LightningCallback(RECIPE, path=tmp_path / "net.bayz")
    trainer = lightning_fit(model, callback, **options)
    assert callback.compressor.total_steps == trainer.global_step
    check_file(tmp_path / "net.bayz", callback.result, model)


def test_lightning_logs_sizes_and_judges_what_comes_out(model):
    callback = bayeszip.LightningCallback(RECIPE)
    module = module_of(model)
    module.example_input_array = None
    module.validation_step = lambda batch: None
    trainer = lightning_fit(model, callback, validation=DataLoader(TensorDataset(*blobs(seed=1)), 64), module=module)
    assert 0 <= trainer.callback_metrics["bayeszip/zeros"] <= 1
    assert trainer.callback_metrics["bayeszip/bytes"] < 4000
    # Example inputs came from a batch.
    assert callback.result.without_graph is None
    assert callback.result.fit.before.accuracy > 0.9
    assert callback.result.accuracy > 0.9


def test_lightning_goes_on_from_its_checkpoint(model, tmp_path):
    from lightning.pytorch import Callback

    class Save(Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 5:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole = bayeszip.LightningCallback(RECIPE)
    lightning_fit(copy.deepcopy(model), whole, Save())
    torch.nn.init.zeros_(model[0].weight)
    again = bayeszip.LightningCallback(RECIPE)
    trainer = lightning_fit(model, again, checkpoint=tmp_path / "half.ckpt")
    assert trainer.global_step == again.compressor.total_steps == whole.compressor.total_steps
    assert evaluate(again.result.model, [blobs(seed=2)]) > 0.95
    assert again.result.ratio > 5


def test_lightning_modules_whose_network_is_not_clear(model):
    from bayeszip.compressor.lightning import _network_of

    module = module_of(model)
    module.head = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"2 parts with parameters \(net, head\)"):
        _network_of(module, None)
    with pytest.raises(ModelError, match="body is not a network; there are: net, head"):
        _network_of(module, "body")
    assert _network_of(module, "net") is module.net


class Classifier(nn.Module):
    """A network as Hugging Face's Trainer wants it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset):
    def __init__(self):
        self.inputs, self.labels = blobs()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def trainer_of(network, callback, folder, evaluation=None, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=12, per_device_train_batch_size=32, learning_rate=0.005, seed=1,
        report_to=[], disable_tqdm=True, use_cpu=True, **{"logging_strategy": "no", "save_strategy": "no", **options},
    )  # fmt: skip
    return Trainer(model=network, args=arguments, train_dataset=Rows(), eval_dataset=evaluation, callbacks=[callback])


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["plain", "all"])
def test_transformers(model, tmp_path, options):
    callback = bayeszip.TrainerCallback(RECIPE, path=tmp_path / "net.bayz")
    network = Classifier(model)
    trainer = trainer_of(network, callback, tmp_path, **options)
    trainer.train()
    assert callback.compressor.total_steps == trainer.state.global_step
    # Nobody gave example inputs: the loader's own will do.
    assert callback.result.without_graph is None
    inputs, labels = blobs(seed=2)
    assert (bayeszip.load(tmp_path / "net.bayz")(inputs).argmax(1) == labels).float().mean() > 0.95
    net = bayeszip.load(
        tmp_path / "net.bayz", into=Classifier(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)))
    )
    assert (net(inputs)["logits"].argmax(1) == labels).float().mean() > 0.95
    assert callback.result.ratio > 5
    assert type(model[0]) is nn.Linear


def test_transformers_logs_sizes_and_judges_what_comes_out(model, tmp_path):
    rows = Rows()
    batch = {"inputs": rows.inputs[:4], "labels": rows.labels[:4]}
    callback = bayeszip.TrainerCallback(RECIPE, example_inputs=batch)
    options = {"logging_strategy": "epoch", "eval_strategy": "epoch"}
    trainer = trainer_of(Classifier(model), callback, tmp_path, evaluation=rows, **options)
    trainer.train()
    logged = [line for line in trainer.state.log_history if "bayeszip/bytes" in line]
    assert len(logged) >= 12
    assert 0 <= logged[-1]["bayeszip/zeros"] <= 1
    assert callback.result.without_graph is None
    assert callback.result.fit.before.accuracy > 0.9
    assert callback.result.accuracy > 0.9


def test_transformers_with_data_that_have_no_numbers_leave_tensors_alone(model, tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([Rows()[place] for place in range(64)])

    callback = bayeszip.TrainerCallback(RECIPE, n_data=64)
    trainer = trainer_of(Classifier(model), callback, tmp_path, max_steps=4)
    trainer.train_dataset = Stream()
    trainer.train()
    assert "no example inputs" in callback.result.without_graph


def test_transformers_goes_on_from_its_checkpoint(model, tmp_path):
    again = copy.deepcopy(model)
    whole = bayeszip.TrainerCallback(RECIPE)
    trainer_of(Classifier(model), whole, tmp_path, save_strategy="steps", save_steps=96).train()
    assert (tmp_path / "checkpoint-96" / "bayeszip.safetensors").exists()
    resumed = bayeszip.TrainerCallback(RECIPE)
    trainer_of(Classifier(again), resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-96"))
    assert resumed.result.blob == whole.result.blob


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_example_inputs_reach_the_compressor(library, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).eval()
    settings = RECIPE.override("start_size=0.05")
    if library == "lightning":
        from bayeszip.compressor.lightning import LightningCallback

        # Its `example_input_array`.
        LightningCallback(settings).setup(None, module_of(network), "fit")
    else:
        from bayeszip.compressor.transformers import TrainerCallback

        trainer_of(network, TrainerCallback(settings, example_inputs=torch.zeros(2, 12)), tmp_path)
    assert network[0].weight.square().mean().sqrt().item() == pytest.approx(0.05, rel=1e-4)


def test_callbacks_outside_of_a_trainer_say_so():
    with pytest.raises(TrainingError, match=r"during trainer\.fit"):
        _ = bayeszip.LightningCallback(RECIPE).compressor
    with pytest.raises(TrainingError, match=r"Trainer\(callbacks"):
        _ = bayeszip.TrainerCallback(RECIPE).compressor


@pytest.mark.parametrize(("name", "library"), [("LightningCallback", "lightning"), ("TrainerCallback", "transformers")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch, name, library):
    monkeypatch.delitem(sys.modules, f"bayeszip.compressor.{library}", raising=False)
    for missing in (library, f"{library}.pytorch"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModelError, match=rf"pip install 'bayeszip\[{library}\]'"):
        getattr(bayeszip, name)
