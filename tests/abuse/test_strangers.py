"""A thousand files from strangers; `python tests/abuse/strangers.py --files 100000` takes more."""

from strangers import campaign, stranger

from bayeszip.operators import OPERATORS


def test_a_thousand_strangers_do_no_harm():
    found = campaign(1000)
    assert found["faults"] == []
    assert found["files"] == found["outcomes"]["decode: passed"] == 1000
    assert found["outcomes"]["load: passed"] > 400  # strangers that are all refused at the door would prove little
    assert len(found["outcomes"]) > 20


def test_strangers_use_every_operator():
    used = {node.op for seed in range(1500) for node in stranger(seed).graph.nodes}
    assert used == set(OPERATORS)
