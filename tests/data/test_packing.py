"""Packed rows against the documents by themselves."""

import itertools
import random

import pytest
import torch
from compare import TOLERANCE, assert_close, randomise

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.arithmetic import CurriculumStream, facts, tokenizer
from mamba3.data.packing import (
    Document,
    MixedStream,
    PackedStream,
    PaddedStream,
    best_fit,
    documents_of,
    pack,
)
from mamba3.models.lm import IGNORE


def documents(seed=0, count=12):
    rng = random.Random(seed)
    texts = [[rng.randrange(20) for _ in range(rng.randint(1, 9))] for _ in range(count)]
    return [Document(ids, ids) for ids in texts]


# Best fit


def test_best_fit_by_hand():
    assert best_fit([6, 3, 5, 4, 2, 1, 7], 10) == [[0, 1], [2, 3, 5], [4, 6]]
    assert best_fit([10, 10], 10) == [[0], [1]]


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_what_a_search_finds(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 30) for _ in range(150)]
    rows = best_fit(lengths, 41)
    assert sorted(itertools.chain(*rows)) == list(range(150))
    spaces = []
    for number, length in enumerate(lengths):
        [row] = [at for at, row in enumerate(rows) if number in row]
        fitting = [space for space in spaces if space >= length]
        if not fitting:
            assert row == len(spaces)
            spaces.append(41)
        else:
            assert spaces[row] == min(fitting)
        spaces[row] -= length
    assert len(rows) == len(spaces)


@pytest.mark.parametrize("length", [0, 11])
def test_a_document_that_fits_no_row(length):
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens, expected 1 to 10"):
        best_fit([3, length], 10)


# Batches


def test_pack_by_hand():
    rows = [[Document([5, 6, 7], [IGNORE, 6, 7]), Document([8, 9], [8, 9])], [Document([4], [4])]]
    batch = pack(rows, 6)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0], [4, 0, 0, 0, 0, 0]]
    ignored = [IGNORE] * 5
    assert batch.labels.tolist() == [[IGNORE, 6, 7, 8, 9, IGNORE], [4, *ignored]]
    assert batch.seq_idx.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    assert batch.n_tokens == 6
    assert {t.dtype for t in (batch.input_ids, batch.labels, batch.seq_idx)} == {torch.int64}


@pytest.mark.parametrize("mimo", [False, True])
def test_loss_and_gradients_are_those_of_the_documents(mimo):
    config = Mamba3Config(
        vocab_size=20, d_model=16, n_layer=2, d_state=6, headdim=8, is_mimo=mimo, mimo_rank=2
    )
    model = randomise(Mamba3LM(config, dtype=torch.float64), scale=0.3)
    parameters = dict(model.named_parameters())
    some = documents()
    some[3] = some[3]._replace(labels=[IGNORE] * 2 + list(some[3].labels[2:]))
    rows = best_fit([len(document.input_ids) for document in some], 23)
    assert len(rows) > 1
    batch = pack([[some[number] for number in row] for row in rows], 23)
    loss = model(batch.input_ids, labels=batch.labels, seq_idx=batch.seq_idx).loss
    packed = torch.autograd.grad(loss, list(parameters.values()))

    total, scored = 0.0, 0
    for document in some:
        ids, labels = (torch.tensor([list(part)]) for part in document)
        if count := int((labels[:, 1:] != IGNORE).sum()):
            total = total + count * model(ids, labels=labels).loss
            scored += count
    expected = torch.autograd.grad(total / scored, list(parameters.values()))
    tolerance = TOLERANCE[torch.float64]
    assert_close(loss, total / scored, tolerance, "loss")
    assert_close(
        dict(zip(parameters, packed, strict=True)),
        dict(zip(parameters, expected, strict=True)),
        2 * tolerance,
    )


# The stream


def unpacked(batch):
    """The documents of a batch, as tuples of ids and labels."""
    found = []
    for ids, labels, numbers in zip(batch.input_ids, batch.labels, batch.seq_idx, strict=True):
        for number in numbers.unique():
            at = numbers == number
            found.append((tuple(ids[at].tolist()), tuple(labels[at].tolist())))
    return [(ids, labels) for ids, labels in found if any(ids) or set(labels) != {IGNORE}]


def test_an_epoch_is_every_document_once():
    problems = CurriculumStream([1, 3], tokenizer(), batch_size=40, seed=3).problems(0)
    some = documents_of(problems, tokenizer())
    stream = PackedStream(some, length=37, batch_size=2, seed=4)
    expected = sorted((tuple(ids), tuple(labels)) for ids, labels in some)
    n_rows = round(sum(len(ids) for ids, _ in some) / (37 * stream.fill))
    batches = [stream(index) for index in range(n_rows)]
    rows = [row for batch in batches for row in batch.input_ids.tolist()]
    first, second = rows[:n_rows], rows[n_rows:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert sorted(found for batch in batches for found in unpacked(batch)) == sorted(2 * expected)
    assert sum(batch.n_tokens for batch in batches) == 2 * sum(len(ids) for ids, _ in some)
    assert stream.fill > 0.9
    for batch in batches:
        assert batch.input_ids.shape == batch.labels.shape == batch.seq_idx.shape == (2, 37)


def test_a_batch_is_a_function_of_seed_and_index():
    some = documents_of(facts(), tokenizer())
    streams = [PackedStream(some, length=64, batch_size=3, seed=seed) for seed in (0, 0, 1)]
    one, same, other = (stream(1234).input_ids for stream in streams)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_errors_of_the_stream():
    with pytest.raises(ValueError, match="no documents"):
        PackedStream([], length=8, batch_size=1, seed=0)
    some = [Document([1], [1]), Document([1] * 9, [1] * 9)]
    with pytest.raises(ValueError, match="document 1 has 9 tokens, expected 1 to 8"):
        PackedStream(some, length=8, batch_size=1, seed=0)


def test_every_document_is_padded_once_an_epoch():
    some = documents_of(facts()[:10], tokenizer())
    stream = PaddedStream(some, batch_size=4, seed=3)
    rows = []
    for batch in map(stream, range(5)):
        assert batch.seq_idx is None
        assert batch.input_ids.shape == batch.labels.shape
        assert batch.n_tokens == int((batch.input_ids != 0).sum())
        for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            n = len(ids) - ids[::-1].index(tokenizer().eos_token_id)
            assert ids[n:] == [0] * (len(ids) - n)
            assert labels[n:] == [IGNORE] * (len(ids) - n)
            rows.append((ids[:n], labels[:n]))
        assert max(len(ids) for ids, _ in rows[-4:]) == batch.input_ids.shape[1]
    expected = sorted((list(d.input_ids), list(d.labels)) for d in some)
    assert sorted(rows[:10]) == sorted(rows[10:]) == expected
    assert rows[:10] != rows[10:]
    again = PaddedStream(some, batch_size=4, seed=3)(2).input_ids
    assert torch.equal(again, stream(2).input_ids)
    with pytest.raises(ValueError, match="no documents"):
        PaddedStream([], batch_size=4, seed=3)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_two_streams_are_mixed(packed):
    some, others = documents_of(facts()[:10], tokenizer()), [Document(range(3, 9), range(3, 9))]

    def stream(documents, batch_size):
        if packed:
            return PackedStream(documents, length=12, batch_size=batch_size, seed=0)
        return PaddedStream(documents, batch_size=batch_size, seed=0)

    first, second = stream(some, 3), stream(others, 2)
    batch, a, b = (make(1) for make in (MixedStream(first, second), first, second))
    assert batch.n_tokens == a.n_tokens + b.n_tokens
    for name, fill in (("input_ids", 0), ("labels", IGNORE), ("seq_idx", 0)):
        mixed, *parts = (getattr(each, name) for each in (batch, a, b))
        if name == "seq_idx" and not packed:
            assert mixed is None
            continue
        for rows, part in ((mixed[:3], parts[0]), (mixed[3:], parts[1])):
            width = part.shape[1]
            assert torch.equal(rows[:, :width], part)
            assert bool((rows[:, width:] == fill).all())
        assert mixed.shape[1] == max(part.shape[1] for part in parts)
