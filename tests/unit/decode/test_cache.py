import pytest
import torch

from medusa_train.decode.cache import DecodeCache
from medusa_train.errors import ModelError

LAYERS, HEADS, SIZE = 2, 3, 4
either_storage = pytest.mark.parametrize("static", [False, True])


def states(tokens, *, layer=0, rows=1):
    """Keys that tell their token, row (in hundreds) and layer (in thousands); values negate them.

    Tokens are [N], the same in all rows.
    """
    keys = torch.tensor(tokens, dtype=torch.float32) + 1000 * layer
    keys = keys + 100 * torch.arange(rows)[:, None]
    keys = keys[:, None, :, None].expand(rows, HEADS, len(tokens), SIZE)
    return keys, -keys


def feed(cache, tokens, *, rows=1):
    """Write tokens into every layer; what the last layer sees."""
    for layer in range(LAYERS):
        seen = cache.update(*states(tokens, layer=layer, rows=rows), layer)
    return seen


def feed_ragged(cache, tokens):
    """As `feed`, behind what is certain in each row."""
    lengths = torch.tensor(cache.lengths)
    cache.places = lengths[:, None] + torch.arange(len(tokens))
    seen = feed(cache, tokens, rows=len(lengths))
    cache.places = None
    return seen


def certain(cache, layer, row=0):
    """Tokens of a row that stay, as the layer's keys tell them."""
    keys, values = cache.update(*states([], layer=layer, rows=len(cache.lengths)), layer)
    kept = slice(cache.lengths[row])
    assert torch.equal(keys[row, :, kept], -values[row, :, kept])
    return (keys[row, 0, kept, 0] - 1000 * layer - 100 * row).tolist()


def test_lengths_after_partial_acceptance():
    """The last token of the answer is not read yet: the cache holds one less than the text."""
    cache = DecodeCache(LAYERS, 40)
    feed(cache, list(range(8)))
    cache.commit([range(8)])
    lengths = [cache.longest + 1]
    for drafts, accepted in [(5, 2), (5, 0), (5, 5), (3, 1)]:
        feed(cache, list(range(50, 51 + drafts)))
        cache.commit([range(accepted + 1)])
        lengths.append(cache.longest + 1)
    assert lengths == [9, 12, 13, 19, 21]
    assert cache.lengths == [20]
    assert cache.get_seq_length() == 20
    assert cache.get_mask_sizes(3) == (23, 0)


@either_storage
@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ([0], [1, 2, 10]),
        ([0, 1, 2], [1, 2, 10, 11, 12]),
        ([0, 2, 5], [1, 2, 10, 12, 15]),
        ([], [1, 2]),
    ],
)
def test_kept_tokens_move_together_in_every_layer(static, keep, left):
    cache = DecodeCache(LAYERS, 20, static=static)
    feed(cache, [1, 2])
    cache.commit([[0, 1]])
    keys, values = feed(cache, [10, 11, 12, 13, 14, 15])
    assert (keys[0, 0, :, 0] - 1000).tolist() == [1, 2, 10, 11, 12, 13, 14, 15]
    assert torch.equal(keys, -values)
    cache.commit([keep])
    assert certain(cache, 0) == certain(cache, 1) == left


@either_storage
def test_every_row_keeps_its_own_tokens_at_its_own_place(static):
    cache = DecodeCache(LAYERS, 20, rows=3, static=static)
    feed(cache, [1, 2, 3], rows=3)
    cache.commit([[0, 1, 2], [0], [0, 1]])
    expected = [[1, 2, 3], [1], [1, 2]]
    steps = [
        ([10, 11, 12, 13], [[0, 2, 3], [0], [0, 1]]),
        ([20, 21, 22, 23], [[0], [0, 1, 3], [0, 2]]),
        ([30, 31], [[0], [0, 1], []]),
    ]
    for tokens, paths in steps:
        feed_ragged(cache, tokens)
        cache.commit(paths)
        for row, path in enumerate(paths):
            expected[row] += [tokens[place] for place in path]
            assert certain(cache, 0, row) == certain(cache, 1, row) == expected[row]
    assert cache.lengths == [8, 7, 6]
    assert cache.longest == 8


def test_rejected_tokens_are_written_over():
    cache = DecodeCache(LAYERS, 20)
    feed(cache, [1, 2, 3, 4])
    cache.commit([[0, 3]])
    feed(cache, [7])
    cache.commit([[0]])
    assert certain(cache, 0) == certain(cache, 1) == [1, 4, 7]


def test_rewind():
    cache = DecodeCache(LAYERS, 20)
    feed(cache, [1, 2, 3, 4])
    cache.commit([range(4)])
    cache.rewind([4])
    assert certain(cache, 1) == [1, 2, 3, 4]
    cache.rewind([9])  # there is no more than four
    assert certain(cache, 1) == [1, 2, 3, 4]
    cache.rewind([3])
    assert certain(cache, 1) == [1, 2, 3]
    cache.rewind([-2])
    assert cache.lengths == [0]
    feed(cache, [8])
    cache.commit([[0]])
    assert certain(cache, 0) == certain(cache, 1) == [8]


@either_storage
def test_rewind_of_each_row(static):
    cache = DecodeCache(LAYERS, 20, rows=3, static=static)
    feed(cache, [1, 2, 3, 4], rows=3)
    cache.commit([range(4)] * 3)
    cache.rewind([2, 9, 0])
    assert cache.lengths == [2, 4, 0]
    feed_ragged(cache, [8])
    cache.commit([[0]] * 3)
    assert [certain(cache, 1, row) for row in range(3)] == [[1, 2, 8], [1, 2, 3, 4, 8], [8]]


@either_storage
def test_storage_keeps_its_address(static):
    cache = DecodeCache(LAYERS, 20, static=static)
    address = feed(cache, [1, 2, 3])[0].data_ptr()
    cache.commit([[0, 2]])
    for tokens in ([5], [6, 7, 8]):
        assert feed(cache, tokens)[0].data_ptr() == address
        cache.commit([[0]])
    cache.rewind([1])
    assert feed(cache, [9])[0].data_ptr() == address


def test_a_compiler_is_shown_all_places():
    """Of its own forwards, whose shapes must not change; a prompt is read without it."""
    cache = DecodeCache(LAYERS, 20, static=True)
    assert feed(cache, [1, 2, 3])[0].shape[2] == 3
    cache.commit([range(3)])
    keys, _ = feed_ragged(cache, [5, 6])
    assert keys.shape[2] == 20
    assert (keys[0, 0, :5, 0] - 1000).tolist() == [1, 2, 3, 5, 6]


def test_beginning_anew_keeps_the_storage():
    cache = DecodeCache(LAYERS, 20, rows=2, static=True)
    address = feed(cache, [1, 2, 3], rows=2)[0].data_ptr()
    cache.commit([[0, 2], [0]])
    cache.restart()
    assert cache.lengths == [0, 0]
    assert feed(cache, [7], rows=2)[0].data_ptr() == address
    cache.commit([[0], [0]])
    assert certain(cache, 0, 1) == certain(cache, 1, 1) == [7]


def test_an_overflow_is_an_error():
    cache = DecodeCache(LAYERS, 4)
    feed(cache, [1, 2, 3])
    cache.commit([range(3)])
    feed(cache, [4])
    with pytest.raises(ModelError, match="5 tokens do not fit a cache for 4"):
        feed(cache, [4, 5])


def test_unequal_layers_are_refused():
    cache = DecodeCache(LAYERS, 4)
    keys, values = states([1])
    cache.update(keys, values, 0)
    with pytest.raises(ModelError, match="layer 1 has 1 key-value heads, layer 0 has 3"):
        cache.update(keys[:, :1], values[:, :1], 1)


@either_storage
def test_rows_that_leave(static):
    cache = DecodeCache(LAYERS, 4, rows=3, static=static)
    feed(cache, [1, 2], rows=3)
    cache.commit([[0, 1], [0], [0]])
    cache.keep_rows([0, 2])
    assert cache.lengths == [2, 1]
    assert certain(cache, 1, 0) == [1, 2]
    keys, _ = cache.update(*states([], rows=2), 1)
    assert keys[1, 0, 0, 0] == 1201  # still that of the third row


@either_storage
def test_one_row_becomes_many(static):
    cache = DecodeCache(LAYERS, 4, static=static)
    feed(cache, [1, 2])
    cache.commit([range(2)])
    cache.repeat_rows(3)
    assert cache.lengths == [2, 2, 2]
    keys, values = cache.update(*states([], rows=3), 1)
    assert (keys[:, 0, :, 0] - 1000).tolist() == [[1, 2]] * 3
    assert torch.equal(keys, -values)
