"""Networks of any layers, compressed by default settings on toy data: small, as good, loaded without their class."""

import warnings

import layered
import pytest
import torch
from torch import nn

import bayeszip
import zoo
from bayeszip.fitting import Watcher
from bayeszip.loading import verify
from bayeszip.recipe import recipe
from bayeszip.record import run_record
from bayeszip.tensors import QuantizedTensor, RawTensor

#: The recipe's schedule, shortened to seconds.
SHORT = recipe("quick").override("epochs_scale=0.1", "all.rate_log_sigma2=4e-3")

#: A training that is only begun.
FEW = recipe("quick").override("all.epochs=2", "closing.epochs=1", "all.rate_log_sigma2=0.05")

#: Points of accuracy that each may lose, and how many times smaller than `pack`'s its file must be.
KINDS = {
    layered.LSTM: (1.0, 4),
    layered.GRU: (1.0, 4),
    layered.ENCODER: (1.0, 2),
    layered.GPT: (1.0, 2),
    layered.BILINEAR: (2.0, 2),
    layered.CONV1D: (2.0, 2),
    layered.OWN: (1.0, 2),
}


def share_right(network, kind):
    """Of targets that are there to be hit."""
    right = total = 0
    with torch.no_grad():
        for inputs, targets in kind.batches(validation=True):
            counts = targets >= 0
            right += ((zoo.called(network, inputs).argmax(-1) == targets) & counts).sum().item()
            total += counts.sum().item()
    return right / total


def inputs_of(kind, rows=2):
    first = kind.batches()[0][0]
    return tuple(each[:rows] for each in (first if isinstance(first, tuple) else (first,)))


def compress(kind, network, **options):
    settings = {"recipe": SHORT, "loss": kind.loss, "device": "cpu", "watcher": Watcher(), **options}
    return bayeszip.compress(network, kind.batches(), **settings)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_layer_is_compressed(kind, tmp_path):
    points, times = KINDS[kind]
    network = zoo.trained(kind.name)
    result = compress(kind, network)
    packed = bayeszip.pack(network, example_inputs=inputs_of(kind))
    matrices = {name for name, each in network.named_parameters() if each.dim() > 1}
    assert matrices <= set(result.fit.conversion.gaussian)
    assert times * result.bytes < packed.bytes
    result.save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz")
    assert share_right(loaded, kind) >= share_right(network, kind) - points / 100
    assert verify(tmp_path / "net.bayz", against=loaded) < 1e-6


def test_what_is_excluded_is_clustered_and_the_report_says_so():
    """An LSTM that could not be made Gaussian made a file of 84,617 bytes where `pack` made one of 21,657."""
    kind, network = layered.LSTM, zoo.trained(layered.LSTM.name)
    result = compress(kind, network, exclude=["rnn"], strengths={"head": 0.5}, recipe=FEW)
    assert isinstance(result.compressed.tensors["rnn.weight_hh_l0"], QuantizedTensor)
    assert len(result.compressed.tensors["rnn.weight_hh_l0"].codebook) <= 65
    assert isinstance(result.compressed.tensors["rnn.bias_hh_l0"], RawTensor)
    assert result.bytes < bayeszip.pack(network, example_inputs=inputs_of(kind)).bytes
    assert "rnn (LSTM, excluded): trained" in result.report()
    settings = recipe_of(result)["layers"]
    assert settings["exclude"] == ["rnn"]
    assert settings["strengths"] == [{"pattern": "head", "factor": 0.5}]
    assert "rnn.weight_hh_l0" not in result.fit.conversion.gaussian


def recipe_of(result):
    return run_record(result, {})["recipe"]


def test_what_is_frozen_stays_bit_for_bit_whatever_its_kind():
    kind, network = layered.LSTM, zoo.trained(layered.LSTM.name)
    network.rnn.requires_grad_(False)
    result = compress(kind, network, recipe=FEW)
    stored = result.compressed.tensors["rnn.weight_hh_l0"]
    assert isinstance(stored, RawTensor)
    assert set(stored.values.ravel().tolist()) <= set(network.rnn.weight_hh_l0.flatten().tolist())
    assert "rnn (LSTM, frozen): left as it was" in " ".join(result.report().split())


def test_norms_are_said_to_be_trained_and_rounded():
    kind = layered.ENCODER
    report = " ".join(compress(kind, zoo.trained(kind.name), recipe=FEW).report().split())
    assert "(LayerNorm): trained, then rounded" in report
    assert "left as it was" not in report


def test_a_stronger_prior_on_a_part_prunes_more_of_it():
    kind, network = layered.OWN, zoo.trained(layered.OWN.name)
    kept = []
    for factor in (0.05, 20.0):
        result = compress(kind, network, strengths={"2": factor}, recipe=FEW.override("all.epochs=10"))
        kept.append(result.compressed.tensors["2.weight"].nonzero)
    assert kept[1] < 0.7 * kept[0]


def test_in_a_loop_of_ones_own():
    kind, network = layered.GRU, zoo.trained(layered.GRU.name)
    batches = kind.batches()
    before, packed = share_right(network, kind), bayeszip.pack(network, example_inputs=inputs_of(kind))
    compressor = bayeszip.Compressor(network, SHORT, n_data=kind.examples, steps_per_epoch=len(batches))
    optimizer = torch.optim.Adam(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    network.train()
    for step in range(compressor.total_steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        (kind.loss(network(inputs), targets) + compressor.regularizer()).backward()
        optimizer.step()
        compressor.step()
    result = compressor.finalize(example_inputs=inputs_of(kind), train_loader=batches)
    assert type(network.rnn) is nn.GRU
    assert share_right(network, kind) > before - 0.02
    assert share_right(result.model, kind) == pytest.approx(share_right(network, kind), abs=0.005)
    assert 4 * result.bytes < packed.bytes


class Sentences(nn.Module):
    """A tiny BERT as Hugging Face's Trainer wants it, that says its scores where nobody asks for a loss."""

    def __init__(self):
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=layered.TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=layered.LENGTH, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert, self.head = BertModel(config, add_pooling_layer=False), nn.Linear(16, 3)

    def forward(self, input_ids, labels=None):
        scores = self.head(self.bert(input_ids).last_hidden_state.mean(1))
        return scores if labels is None else {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


BERT = zoo.add(zoo.Kind("tiny BERT", Sentences, layered.majority, examples=1024, epochs=30))


def test_bert_through_hugging_faces_trainer(tmp_path):
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    network = zoo.trained(BERT.name)
    before, packed = share_right(network, BERT), bayeszip.pack(network, example_inputs=inputs_of(BERT))
    inputs, labels = layered.majority(BERT.examples, 0)
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(inputs, labels, strict=True)]
    callback = bayeszip.TrainerCallback("quick", example_inputs=inputs_of(BERT), path=tmp_path / "net.bayz")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=20, per_device_train_batch_size=64, learning_rate=3e-3, seed=1,
        report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the library are not ours
        Trainer(model=network, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    loaded = bayeszip.load(tmp_path / "net.bayz")
    assert share_right(loaded, BERT) >= before - 0.02
    assert callback.result.bytes < packed.bytes
    assert verify(tmp_path / "net.bayz", against=loaded) < 1e-6
