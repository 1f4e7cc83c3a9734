"""The format as it is promised: golden files, the written page, and a second decoder."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import second_decoder
from agreement import agrees, digest
from codec_models import compressed_models
from hypothesis import given, settings

from bayeszip.codec import CODERS, decode, describe, encode
from bayeszip.tensors import CompressedModel, Graph, LogGrid, Node, QuantizedTensor, UniformGrid

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
MANIFEST = {
    f"{version}/{name}": expected
    for version in ("v1", "v2")
    for name, expected in json.loads((GOLDEN / version / "manifest.json").read_text()).items()
}


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_golden_files_decode_bit_for_bit(name):
    expected = MANIFEST[name]
    blob = (GOLDEN / name).read_bytes()
    model = decode(blob)
    assert digest(model) == expected["digest"]
    assert encode(model, coder=expected["coder"], **expected["options"]) == blob
    assert (describe(blob).coder, describe(blob).options) == (expected["coder"], expected["options"])
    assert describe(blob).version == int(name[1])


def test_no_golden_file_is_missing():
    assert {f"{path.parent.name}/{path.name}" for path in GOLDEN.glob("v?/*.bayz")} == set(MANIFEST)
    assert len(MANIFEST) >= 35


@pytest.mark.parametrize("name", [name for name in sorted(MANIFEST) if "lenet" not in name and "large" not in name])
def test_the_second_decoder_agrees_on_golden_files(name):
    blob = (GOLDEN / name).read_bytes()
    agrees(blob, decode(blob))


@pytest.mark.parametrize("coder", CODERS)
@settings(max_examples=60)
@given(model=compressed_models())
def test_the_second_decoder_agrees_on_any_model(coder, model):
    agrees(encode(model, coder=coder), model)


def test_the_example_on_the_page_is_real():
    page = (ROOT / "docs" / "format.md").read_text()
    written = [bytes.fromhex(block) for block in re.findall(r"```hex\n(.*?)\n```", page, re.DOTALL)]
    codebook = np.array([0, 0.5, -0.5], dtype=np.float32)
    weight = QuantizedTensor(np.array([[0, 1, 0, 0], [0, 0, 0, 0], [2, 1, 0, 1]]), codebook)
    bias = QuantizedTensor(np.array([0, 0, 2]), codebook)
    graph = Graph(1, (Node("linear", (0,), ("fc.weight", "fc.bias")), Node("relu", (1,))), (2,))
    model = CompressedModel({"fc.weight": weight, "fc.bias": bias}, graph)
    assert written == [encode(model, coder=coder, packed=0) for coder in ("csr-huffman", "context")]
    by_byte = page.split("| bytes | meaning |")[1].split("The payload's bits")[0]
    cells = [row.split("|")[1] for row in by_byte.splitlines() if row.startswith("| `")]
    assert bytes.fromhex("".join(re.findall("`([0-9a-f ]+)`", "".join(cells)))) == written[0]
    by_bit = page.split("| bits | meaning |")[1].split("So `fc.weight`")[0]
    cells = [row.split("|")[1] for row in by_bit.splitlines() if row.startswith("| `")]
    bits = "".join(re.findall("`([01]+)`", "".join(cells)))
    assert int(bits, 2).to_bytes(len(bits) // 8, "big") == written[0][25:-4]


def test_the_example_of_version_2_is_real():
    page = (ROOT / "docs" / "format.md").read_text()
    written = bytes.fromhex(re.search(r"```v2\n(.*?)\n```", page).group(1))
    scale = QuantizedTensor.on_grid(np.array([1, 3]), LogGrid(0.5, 1.5, 4, signed=False))
    weight = QuantizedTensor.on_grid(np.array([[1, 0], [2, 4]]), UniformGrid(0.25, 5), scale)
    assert weight.dequantize().tolist() == [[-0.125, 0], [0.28125, 0.5625]]
    assert written == encode(CompressedModel({"w": weight}), coder="csr-huffman", packed=0)
    rows = page.split("| bytes of version 2 | meaning |")[1].split("So `w` is")[0]
    cells = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    assert bytes.fromhex("".join(re.findall("`([0-9a-f ]+)`", "".join(cells)))) == written


def test_the_numbers_on_the_page_are_those_of_the_second_decoder():
    page = (ROOT / "docs" / "format.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z]+_[A-Z]+) \| ([0-9, ]+) \|$", page, re.MULTILINE))
    numbers = {name: tuple(map(int, values.split(","))) for name, values in rows.items()}
    assert numbers.pop("CELL_PRIORS") == second_decoder.PRIORS
    for name, (weights, rate) in {
        "CELL": second_decoder.CELLS,
        "VALUE": second_decoder.VALUES,
        "FLAG": second_decoder.FLAGS,
        "RAW": second_decoder.RAW,
    }.items():
        assert numbers.pop(f"{name}_WEIGHTS") == weights
        assert numbers.pop(f"{name}_RATE") == (rate,)
    assert not numbers
